"""What the client itself added to what it measured, request by request and event by event.

Three things: how long bytes lay in the kernel before they were read (`event_lags`, `end_lag`), how long the client took
to send a request (t_sent - t_send without `send_blocked_s`), and how late it was sent, after the same user's previous
answer (closed loop) or its scheduled start (open loop).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddtree_bench.metrics.answers import Answer
from ddtree_bench.metrics.parsed import Request, Requests, parse
from ddtree_bench.metrics.tokens import Row, bears_tokens
from ddtree_bench.plan import Load

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PROMPT_READ_S = 0.0005
"""A read with less lag was not waited for, so the events it held had come in one packet."""

_PACKING_SHARE = 0.05
"""Share of such reads with several events from which the server is taken to pack events into one packet."""


@dataclass(frozen=True)
class ClientShare:
    """A cell with and without the client's share.

    Attributes
    ----------
    seen, without_client : sequence of Request
        All requests, as measured and without the client's share.
    lags : array of float, shape (M,)
        How long each token-bearing event of the ok requests lay unread, s, NaN where that is unknown.
    late : array of float, shape (n,)
        How late each request was sent by the client's doing, s, the sending itself included.
    """

    seen: Sequence[Request] = field(repr=False)
    without_client: Sequence[Request] = field(repr=False)
    lags: Floats = field(repr=False)
    late: Floats = field(repr=False)

    @property
    def known(self) -> float:
        """Share of the events whose lag is known."""
        return float(np.mean(~np.isnan(self.lags))) if self.lags.size else 0.0


def client_share(requests: Requests, load: Load) -> ClientShare:
    """Return a cell with and without what the client added; `requests` as every function of metrics takes them.

    A lag that is not known counts as none.
    """
    parsed = parse(requests)
    lags = [_lags(one.row) for one in parsed]
    end_lags = _end_lags(parsed, lags)
    sending = _sending_s(parsed)
    late = _late(parsed, end_lags, sending, load)
    shift = late if load.kind == "open" else _chained(late, parsed)
    given = [_of_answer(one, own) for one, own in zip(parsed, lags, strict=True)]
    known = _concatenated(own for own, _ in given if own is not None)
    events = iter(_split(_lags_of_packed_reads(parsed, np.nan_to_num(known)), parsed))
    without = [
        Request(
            _moved(one.row, shift[n] - sending[n], end_lags[n] + shift[n]),
            None if one.answer is None else _without(one.answer, next(events), given[n][1], sending[n], shift[n]),
            one.details,
        )
        for n, one in enumerate(parsed)
    ]
    return ClientShare(parsed, without, known, late)


def _lags(row: Row) -> Floats:
    """Lags of all events of a request; NaN where they are unknown."""
    lags = row["event_lags"]
    if lags is None:
        return np.full(len(row["event_times"]), np.nan)
    # What lies unread for less than nothing is the clocks' doing.
    return np.maximum(np.asarray(lags, dtype=float), 0.0)


def _end_lags(parsed: Sequence[Request], lags: Sequence[Floats]) -> Floats:
    """How long the end of each answer lay unread; that of its last event where it is not recorded."""
    recorded = _column(parsed, "end_lag")
    of_last = np.array([own[-1] if own.size else 0.0 for own in lags], dtype=float)
    return np.maximum(np.nan_to_num(np.where(np.isnan(recorded), of_last, recorded)), 0.0)


def _sending_s(parsed: Sequence[Request]) -> Floats:
    """Seconds that the client took to send each request, without those in which the kernel took no more bytes."""
    taken = _column(parsed, "t_sent") - _column(parsed, "t_send") - np.nan_to_num(_column(parsed, "send_blocked_s"))
    return np.maximum(np.nan_to_num(taken), 0.0)


def _late(parsed: Sequence[Request], end_lags: Floats, sending: Floats, load: Load) -> Floats:
    """How late each request was sent, s, shape (n,); the first of a user in a closed loop is due when it is sent.

    Connecting anew is not the client's share, nor is a pause between tries.
    """
    send, end = _column(parsed, "t_send"), _column(parsed, "t_end")
    order, same = _chains(parsed)
    due = np.full(len(order), np.nan)
    due[order[1:]] = np.where(same, (end - end_lags)[order][:-1], np.nan)
    if load.kind == "open":
        due = np.fmax(due, _column(parsed, "intended_start"))
    late = np.nan_to_num(send - due - np.nan_to_num(_column(parsed, "connect_s")))
    return np.where(np.nan_to_num(_column(parsed, "retries")) > 0, 0.0, np.maximum(late, 0.0)) + sending


def _chains(parsed: Sequence[Request]) -> tuple[Ints, NDArray[np.bool_]]:
    """The requests by user and moment, and whether each of them but the first has the user of the one before."""
    worker = _column(parsed, "worker")
    order = np.lexsort((_column(parsed, "t_send"), worker))
    return order, worker[order][1:] == worker[order][:-1]


def _chained(late: Floats, parsed: Sequence[Request]) -> Floats:
    """By how much each request of a closed loop is late: what delays one delays all later ones of its user."""
    if not len(late):
        return late
    order, same = _chains(parsed)
    total = np.cumsum(late[order])
    new = np.concatenate([[True], ~same])
    before = np.repeat((total - late[order])[new], np.diff(np.flatnonzero(new), append=len(order)))
    shift = np.empty(len(order))
    shift[order] = total - before
    return shift


def _of_answer(one: Request, lags: Floats) -> tuple[Floats | None, float]:
    """Lags of an answer's token-bearing events and of its last event, with tokens or the finish_reason."""
    if one.answer is None:
        return None, 0.0
    bearing = bears_tokens(one.row)
    last = np.flatnonzero(bearing | np.asarray(one.row["event_finish"], dtype=bool))[-1]
    return lags[bearing], float(np.nan_to_num(lags[last]))


def _moved(row: Row, send_late: float, end_late: float) -> Row:
    send = row["t_send"] - send_late
    return {**row, "t_send": send, "t_sent": send + (row["t_sent"] - row["t_send"]), "t_end": row["t_end"] - end_late}


def _without(given: Answer, lags: Floats, last_lag: float, sending: float, shift: float) -> Answer:
    return replace(
        given,
        t_send=given.t_send + sending - shift,
        times=given.times - lags - shift,
        last=given.last - last_lag - shift,
    )


def _lags_of_packed_reads(parsed: Sequence[Request], lags: Floats) -> Floats:
    """Lags with those of events that were read together made longer: the kernel stamps only the last of them.

    Where the reader was late, the others are taken to have come one mean gap of their request before one another, but
    after the read before; where it was not, or the server packs events by itself, they came together.
    """
    if not len(lags):
        return lags
    reads = _Reads.of([one.answer for one in parsed if one.answer is not None], lags)
    prompt = reads.lag < _PROMPT_READ_S
    packed = np.count_nonzero(prompt & (reads.size > 1))
    if packed > _PACKING_SHARE * np.count_nonzero(prompt):
        return lags
    spacing = np.where(prompt, 0.0, reads.spacing)
    return lags + np.repeat(spacing, reads.size) * reads.from_end


@dataclass(frozen=True)
class _Reads:
    """The reads that brought token-bearing events: events, lag, and likely time between events of each."""

    size: Ints
    lag: Floats
    spacing: Floats
    from_end: Ints

    @classmethod
    def of(cls, answers: Sequence[Answer], lags: Floats) -> _Reads:
        times, send = _concatenated(given.times for given in answers), np.array([given.t_send for given in answers])
        events = np.array([given.times.size for given in answers])
        first = np.cumsum(events) - events
        starts = np.ones(len(times), dtype=bool)
        starts[1:] = np.diff(times) != 0
        starts[first] = True
        begin = np.flatnonzero(starts)
        size = np.diff(begin, append=len(times))
        request = np.repeat(np.arange(events.size), events)[begin]
        lag = lags[begin]
        # The read before, or the request itself where there was none.
        before = np.where(begin == first[request], send[request], times[begin - 1])
        window = np.maximum(times[begin] - lag - before, 0.0)
        mean_gap = (times[first + events - 1] - times[first]) / np.maximum(events - 1, 1)
        from_end = np.repeat(begin + size - 1, size) - np.arange(len(times))
        return cls(size, lag, np.minimum(window / size, mean_gap[request]), from_end)


def _split(values: Floats, parsed: Sequence[Request]) -> list[Floats]:
    """Values of all token-bearing events, answer by answer."""
    ends = np.cumsum([one.answer.times.size for one in parsed if one.answer is not None])
    return [values[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)] if ends.size else []


def _column(parsed: Sequence[Request], name: str) -> Floats:
    """A column of numbers, NaN where it has none, shape (n,)."""
    values: Iterable[Any] = (one.row[name] for one in parsed)
    return np.array([np.nan if pd.isna(value) else float(value) for value in values], dtype=float)


def _concatenated(arrays: Iterable[Floats]) -> Floats:
    return np.concatenate([np.empty(0), *arrays])
