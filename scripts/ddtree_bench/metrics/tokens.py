"""How many tokens an answer has, and how many came with each of its events.

Never max_tokens and never the number of events: both are wrong under speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Row = Mapping[Any, Any]
"""A raw row: values by the column names of requests_table.SCHEMA."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of an answer with m token-bearing events; None where they are not known.

    Attributes
    ----------
    total : int or None
        N, at least 1.
    source : str or None
        Where N is from: "usage" or "tokenizer".
    n1 : int or None
        Tokens carried by the first token-bearing event.
    counts : array of int, shape (m,), or None
        Tokens carried by each event, n1 ... nm, with sum N: a token that came after the last text (an EOS) is counted
        with the last event.
    n_source : str or None
        Where n1 and `counts` are from: "usage" (continuous usage), "tokenizer" or "text_share".
    """

    total: int | None = None
    source: str | None = None
    n1: int | None = None
    counts: NDArray[np.int64] | None = None
    n_source: str | None = None


def received(row: Row) -> tuple[int | None, str | None]:
    """Return the output tokens of a row, failed ones too, and where the number is from: "usage" or "tokenizer".

    Usage counts when no token-bearing event came after the last that had it: a count given in the middle is not that of
    the answer. A count of 0 beside text is none. Without usage the tokenizer's counts are summed, where there are any.
    A row without a token-bearing event and without usage has no tokens; (None, None) when the number is not known.
    """
    bearing = np.flatnonzero(bears_tokens(row))
    if not bearing.size:
        told = row["completion_tokens"]
        return (0, None) if pd.isna(told) else (int(told), "usage")
    if (told := _by_usage(row, bearing[-1])) is not None:
        return told, "usage"
    tokenized = row["event_tokenized"]
    if tokenized is not None and (counted := int(np.sum(tokenized))):
        return counted, "tokenizer"
    return None, None


def bears_tokens(row: Row) -> NDArray[np.bool_]:
    """Return which events of a row are token-bearing."""
    return np.asarray(row["event_kinds"], dtype=object) == "token"


def _by_usage(row: Row, last_bearing: int) -> int | None:
    told = row["completion_tokens"]
    if pd.isna(told) or told < 1:
        return None
    tellers = np.flatnonzero(~np.isnan(np.asarray(row["event_tokens"], dtype=float)))
    return None if tellers.size and tellers[-1] < last_bearing else int(told)


def tokens_of(row: Row) -> Tokens:
    """Return the tokens of a row with at least one token-bearing event."""
    total, source = received(row)
    if total is None:
        return Tokens()
    bearing = bears_tokens(row)
    n1, counts, n_source = _by_event(row, bearing, total)
    return Tokens(total, source, n1, counts, n_source)


def _by_event(row: Row, bearing: NDArray[np.bool_], total: int) -> tuple[int, NDArray[np.int64], str]:
    """n1, the tokens of each token-bearing event with sum `total`, and where they are from."""
    so_far = np.asarray(row["event_tokens"], dtype=float)[bearing]
    # Continuous usage is what it should be: at least 1, given with every event, never falling, never above the total.
    if np.all(so_far >= 1) and np.all(np.diff(so_far) >= 0) and so_far[-1] <= total:
        counts = np.diff(so_far, prepend=0).astype(np.int64)
        return _with_rest(counts, total, "usage")
    tokenized = row["event_tokenized"]
    if tokenized is not None and np.sum(tokenized):
        return _with_rest(_tokenized(np.asarray(tokenized, dtype=np.int64)[bearing], total), total, "tokenizer")
    counts = share_by_text(
        total, np.array([len(text) for text in np.asarray(row["event_texts"], dtype=object)[bearing]])
    )
    return int(counts[0]), counts, "text_share"


def _with_rest(counts: NDArray[np.int64], total: int, source: str) -> tuple[int, NDArray[np.int64], str]:
    """Count what came after the last text with the last event; n1 is without it."""
    n1 = int(counts[0])
    counts[-1] += total - int(counts.sum())
    return n1, counts, source


def _tokenized(counts: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """The tokenizer's counts, made to agree with a total from usage; one token less is an EOS that has no text.

    Any other difference (markers that the server takes out, a tokenizer that splits otherwise) is spread in proportion.
    """
    if counts.sum() not in (total, total - 1):
        edges = np.floor(np.cumsum(counts) * (total / counts.sum()) + 0.5).astype(np.int64)
        edges[-1] = total
        counts = np.diff(edges, prepend=0)
    return _first_has_one(counts)


def _first_has_one(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give the first event one of the tokens of the next that has any: before the first token there is no event."""
    if not counts[0] and counts.any():
        counts[np.flatnonzero(counts)[0]] -= 1
        counts[0] = 1
    return counts


def share_by_text(tokens: int, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Divide a number of tokens over events by the lengths of their texts, characters.

    An event with text carries at least one token, so as long as there are enough tokens each event gets one and the
    short ones no more; the others share the rest by length. Events without any text (tool calls) count as one letter.
    When there are fewer tokens than events the first still has one.

    >>> share_by_text(100, [160] + [4] * 60)[:3].tolist()
    [40, 1, 1]
    """
    weights = np.maximum(lengths, 1).astype(float)
    shares = _at_least_one(tokens, weights) if tokens >= len(weights) else tokens * weights / weights.sum()
    edges = np.floor(np.cumsum(shares) + 0.5).astype(np.int64)
    edges[-1] = tokens
    return _first_has_one(np.diff(edges, prepend=0))


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
