"""One answer as moments and tokens: the ground on which the metrics of requests and cells stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddtree_bench.metrics.tokens import Row, Tokens, bears_tokens, tokens_of


@dataclass(frozen=True)
class Answer:
    """A request that ended well. m is the number of its token-bearing events, at least 1.

    Attributes
    ----------
    t_send : float
        t0, when it was sent, s.
    intended_start : float or None
        When it was to be sent, s; open loop only.
    times : array of float, shape (m,)
        e1 ... em, the moments of the token-bearing events, s.
    last : float
        The last token-bearing event or the one with the finish_reason, whichever is later, s: an EOS token counts in
        the output and carries no text.
    tokens : Tokens
        N and the tokens carried by each event.
    """

    t_send: float
    intended_start: float | None
    times: NDArray[np.float64]
    last: float
    tokens: Tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token: e1 - t0."""
        return float(self.times[0] - self.t_send)

    @property
    def e2e_s(self) -> float:
        """From sending to the last event; trailing usage events and [DONE] do not count."""
        return self.last - self.t_send

    @property
    def ttft_from_intended_s(self) -> float | None:
        """E1 - scheduled start, s: what the client made the request wait is in it. None in a closed loop."""
        return None if self.intended_start is None else float(self.times[0] - self.intended_start)

    @property
    def e2e_from_intended_s(self) -> float | None:
        """From the scheduled start to the last event, s. None in a closed loop."""
        return None if self.intended_start is None else self.last - self.intended_start

    @property
    def decode_s(self) -> float:
        """E2E - TTFT, s: the time of the N - n1 tokens after the first event."""
        return self.last - float(self.times[0])

    @property
    def decode_tokens(self) -> int | None:
        """N - n1; None when it is unknown or not positive, and when one event brought the whole answer, its EOS too."""
        total, n1 = self.tokens.total, self.tokens.n1
        at_once = self.times.size == 1 and self.last == self.times[0]
        return None if total is None or n1 is None or total <= n1 or at_once else total - n1

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
        return None if self.tokens.total is None or self.e2e_s <= 0 else self.tokens.total / self.e2e_s

    def itl_s(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Token-weighted inter-token latencies: the latencies, s, and how many tokens have each.

        The gap before an event is divided over the tokens it carries; the gap before an event of no token joins the
        next, and after the last tokens the one before. The sum of latency times tokens is em - e1, unless there is no
        token after the first event: then there is no latency.
        """
        counts = self.tokens.counts
        if counts is None or not np.any(counts[1:]):
            return np.empty(0), np.empty(0, dtype=np.int64)
        carriers = np.flatnonzero(counts[1:]) + 1
        ends = self.times[carriers]
        ends[-1] = self.times[-1]
        tokens = counts[carriers]
        return np.diff(ends, prepend=self.times[0]) / tokens, tokens


def answer(row: Row) -> Answer | None:
    """Return the answer of a raw row, or None when its status is not ok."""
    if row["status"] != "ok":
        return None
    times = np.asarray(row["event_times"], dtype=float)
    bearing = bears_tokens(row)
    finish = np.asarray(row["event_finish"], dtype=bool)
    return Answer(
        t_send=float(row["t_send"]),
        intended_start=None if pd.isna(row["intended_start"]) else float(row["intended_start"]),
        times=times[bearing],
        last=float(times[bearing | finish].max()),
        tokens=tokens_of(row),
    )
