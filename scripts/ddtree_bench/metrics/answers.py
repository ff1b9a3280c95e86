"""One answer as moments and tokens: the ground on which the metrics of requests and cells stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Row = Mapping[Any, Any]
"""A raw row: values by the column names of requests_table.SCHEMA."""


@dataclass(frozen=True)
class Answer:
    """A request that ended well. m is the number of its token-bearing events, at least 1.

    Attributes
    ----------
    t_send : float
        When it was sent, s.
    times : array of float, shape (m,)
        e1 ... em, the moments of the token-bearing events, s.
    last : float
        The last token-bearing event or the one with the finish_reason, whichever is later, s: an EOS token counts in
        the output and carries no text.
    tokens : int or None
        N, the output tokens by the server's usage. Without usage N is unknown: there is no tokenizer here yet that
        could count the text.
    n1 : int or None
        Tokens carried by the first token-bearing event.
    counts : array of int, shape (m,), or None
        Tokens carried by each event, n1 ... nm, with sum N: tokens that came after the last text (an EOS) are counted
        with the last event. `n_source` is "usage" (continuous usage) or "text_share", None when N is unknown.
    """

    t_send: float
    times: NDArray[np.float64]
    last: float
    tokens: int | None
    n1: int | None
    counts: NDArray[np.int64] | None
    n_source: str | None

    @property
    def ttft_s(self) -> float:
        """Time to first token: e1 - t0."""
        return float(self.times[0] - self.t_send)

    @property
    def e2e_s(self) -> float:
        """From sending to the last event; trailing usage events and [DONE] do not count."""
        return self.last - self.t_send

    @property
    def decode_s(self) -> float:
        """E2E - TTFT, s: the time of the N - n1 tokens after the first event."""
        return self.e2e_s - self.ttft_s

    @property
    def decode_tokens(self) -> int | None:
        """N - n1, or None when it is unknown or not positive: all tokens came in one event."""
        if self.tokens is None or self.n1 is None or self.tokens <= self.n1:
            return None
        return self.tokens - self.n1

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, (E2E - TTFT) / (N - n1), s."""
        return None if self.decode_tokens is None else self.decode_s / self.decode_tokens

    @property
    def icl_s(self) -> NDArray[np.float64]:
        """Inter-chunk latencies e(i+1) - e(i), s, shape (m - 1,)."""
        return np.diff(self.times)

    @property
    def user_speed_tok_s(self) -> float | None:
        """N / E2E, tokens/s; None when N is unknown or no time passed on the clock."""
        return None if self.tokens is None or self.e2e_s <= 0 else self.tokens / self.e2e_s

    def itl_s(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Token-weighted inter-token latencies: the latencies, s, and how many tokens have each.

        The gap before an event is divided over the tokens it carries; the gap before an event of no token joins the
        next, and after the last tokens the one before. The sum of latency times tokens is em - e1, unless there is no
        token after the first event: then there is no latency.
        """
        if self.counts is None:
            return np.empty(0), np.empty(0, dtype=np.int64)
        carriers = np.flatnonzero(self.counts[1:]) + 1
        if not carriers.size:
            return np.empty(0), np.empty(0, dtype=np.int64)
        ends = self.times[carriers]
        ends[-1] = self.times[-1]
        gaps = np.diff(ends, prepend=self.times[0])
        tokens = self.counts[carriers]
        return gaps / tokens, tokens


def answer(row: Row) -> Answer | None:
    """Return the answer of a raw row, or None when its status is not ok."""
    if row["status"] != "ok":
        return None
    times = np.asarray(row["event_times"], dtype=float)
    bearing = np.asarray([kind == "token" for kind in row["event_kinds"]], dtype=bool)
    finish = np.asarray(row["event_finish"], dtype=bool)
    texts = [text for text, bears in zip(row["event_texts"], bearing, strict=True) if bears]

    # Never max_tokens and never the number of events: both are wrong under speculation.
    tokens = None if pd.isna(row["completion_tokens"]) else int(row["completion_tokens"])
    n1, counts, n_source = None, None, None
    if tokens is not None:
        so_far = np.asarray(row["event_tokens"], dtype=float)[bearing]
        n1, counts, n_source = _tokens_by_event(tokens, so_far, texts)
    return Answer(
        t_send=float(row["t_send"]),
        times=times[bearing],
        last=float(times[bearing | finish].max()),
        tokens=tokens,
        n1=n1,
        counts=counts,
        n_source=n_source,
    )


def _tokens_by_event(tokens: int, so_far: NDArray[np.float64], texts: list[str]) -> tuple[int, NDArray[np.int64], str]:
    """n1, the tokens of each event with sum `tokens`, and where they are from.

    `so_far` is the continuous usage at each event, NaN where it was not given. It is used when every event has it and
    it is what it should be: at least 1, never falling, never above the total.
    """
    if np.all(so_far >= 1) and np.all(np.diff(so_far) >= 0) and so_far[-1] <= tokens:
        counts = np.diff(so_far, prepend=0).astype(np.int64)
        n1 = int(counts[0])
        counts[-1] += tokens - int(so_far[-1])
        return n1, counts, "usage"
    counts = share_by_text(tokens, texts)
    return int(counts[0]), counts, "text_share"


def share_by_text(tokens: int, texts: list[str]) -> NDArray[np.int64]:
    """Divide a number of tokens over events by the length of their texts.

    An event with text carries at least one token, so as long as there are enough tokens each event gets one and the
    short ones no more; the others share the rest by length. Events without any text (tool calls) count as one letter.

    >>> share_by_text(100, ["x" * 160] + ["word"] * 60)[:3].tolist()
    [40, 1, 1]
    """
    lengths = np.maximum([len(text) for text in texts], 1).astype(float)
    shares = tokens * lengths / lengths.sum()
    if tokens >= len(texts):
        shares = _at_least_one(tokens, lengths)
    edges = np.floor(np.cumsum(shares) + 0.5).astype(np.int64)
    edges[-1] = tokens
    return np.diff(edges, prepend=0)


def _at_least_one(tokens: int, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares by length with none below 1: events whose share is less get 1, the others share what is left."""
    shares = np.ones_like(lengths)
    free = np.ones_like(lengths, dtype=bool)
    while free.any():
        left = tokens - np.count_nonzero(~free)
        shares[free] = left * lengths[free] / lengths[free].sum()
        short = free & (shares < 1)
        if not short.any():
            break
        shares[short] = 1.0
        free &= ~short
    return shares
