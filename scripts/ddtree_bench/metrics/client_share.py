"""What the client itself added to what it measured, request by request and event by event.

Three things: how long bytes lay in the kernel before they were read (`event_lags`), how long a request took to be sent
(t_sent - t_send), and how late it was sent, after the same user's previous answer (closed loop) or its scheduled start
(open loop). `seen` is a cell as it was measured and `without_client` the same cell without these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ddtree_bench.metrics.timeline import Floats, Ints, Timeline, column, flat, tokens_of_events
from ddtree_bench.plan import Load

LONG_PROMPT_TOKENS = 4096
"""From this length on the time to send a request says how fast the network is, not the client."""

_PROMPT_READ_S = 0.0005
"""A read with less lag was not waited for, so the events it held had come in one packet."""

_PACKING_SHARE = 0.05
"""Share of such reads with several events from which the server is taken to pack events into one packet."""


@dataclass(frozen=True)
class ClientShare:
    """A cell with and without the client's share.

    Attributes
    ----------
    seen, without_client : Timeline
        The ok requests, as measured and without the client's share.
    lags : array of float, shape (M,)
        How long each event lay unread, s, as far as that is known.
    known : float
        Share of the events whose lag is known.
    """

    seen: Timeline = field(repr=False)
    without_client: Timeline = field(repr=False)
    lags: Floats = field(repr=False)
    known: float


def client_share(requests: pd.DataFrame, load: Load) -> ClientShare:
    """Return a cell with and without what the client added; `requests` as in requests_table.SCHEMA."""
    ok = (requests["status"] == "ok").to_numpy(dtype=bool)
    lengths = np.array([len(times) for times in requests["event_times"]], dtype=np.int64)
    given = flat(requests["event_lags"])
    filled = _filled(flat(requests["event_times"]), given)
    end_lags = np.where(lengths > 0, np.append(filled, 0.0)[np.cumsum(lengths) - 1], 0.0)
    shift = _shifts(requests, end_lags, load)[ok]
    seen, bearing, last = _seen(requests[ok])
    of_ok = np.repeat(ok, lengths)
    lags = _lags_of_packed_reads(seen, filled[of_ok][bearing])
    without_client = replace(
        seen,
        send=seen.send + _sending_s(requests[ok]) - shift,
        end=seen.end - end_lags[ok] - shift,
        last=seen.last - filled[of_ok][last] - shift,
        times=seen.times - lags - np.repeat(shift, seen.events),
    )
    known = ~np.isnan(given[of_ok][bearing])
    return ClientShare(seen, without_client, lags, float(known.mean()) if known.size else 0.0)


def timeline(requests: pd.DataFrame) -> Timeline:
    """Return ok requests as they were measured."""
    return _seen(requests)[0]


def _seen(requests: pd.DataFrame) -> tuple[Timeline, Ints, Ints]:
    """The ok requests as measured, and which of all their events bear tokens and which are their last."""
    lengths = np.array([len(times) for times in requests["event_times"]], dtype=np.int64)
    times = flat(requests["event_times"])
    bears = flat(requests["event_kinds"], object) == "token"
    counting = np.flatnonzero(flat(requests["event_finish"], bool) | bears)
    bearing = np.flatnonzero(bears)
    row = np.repeat(np.arange(len(lengths)), lengths)
    first = np.searchsorted(row[bearing], np.arange(len(lengths)))
    # Every ok request has a token-bearing event.
    last = counting[np.searchsorted(row[counting], np.arange(len(lengths)), side="right") - 1]
    so_far = flat(requests["event_tokens"])[bearing]
    seen = Timeline(
        send=column(requests, "t_send"),
        end=column(requests, "t_end"),
        last=times[last],
        intended=column(requests, "intended_start"),
        first=first,
        times=times[bearing],
        tokens=tokens_of_events(so_far, column(requests, "completion_tokens"), first),
    )
    return seen, bearing, last


def _filled(times: Floats, lags: Floats) -> Floats:
    """Lags of all events, with the nearest known one in time where it is unknown; 0 where none is known.

    One thread reads for all requests, so what held it up for one held it up for the others.
    """
    known = np.flatnonzero(~np.isnan(lags))
    if len(known) == len(lags):
        return np.maximum(lags, 0.0)
    if not len(known):
        return np.zeros(len(lags))
    known = known[np.argsort(times[known], kind="stable")]
    moments = times[known]
    after = np.searchsorted(moments, times).clip(max=len(known) - 1)
    before = (after - 1).clip(min=0)
    nearer = np.where(times - moments[before] <= moments[after] - times, before, after)
    return np.maximum(np.where(np.isnan(lags), lags[known][nearer], lags), 0.0)


def _sending_s(requests: pd.DataFrame) -> Floats:
    """Seconds that sending each request took, as far as that may be the client's doing."""
    taken = np.nan_to_num(column(requests, "t_sent") - column(requests, "t_send"))
    return np.where(column(requests, "prompt_tokens") > LONG_PROMPT_TOKENS, 0.0, np.maximum(taken, 0.0))


def _shifts(requests: pd.DataFrame, end_lags: Floats, load: Load) -> Floats:
    """By how much all moments of each request are late because it was sent late, s, shape (rows,).

    In a closed loop a late request makes all later ones of its user late. Connecting anew is not the client's share,
    nor is a pause between tries.
    """
    send, end = column(requests, "t_send"), column(requests, "t_end")
    worker = column(requests, "worker")
    order = np.lexsort((send, worker))
    same = worker[order][1:] == worker[order][:-1]
    due = np.full(len(order), np.nan)
    due[order[1:]] = np.where(same, (end - end_lags)[order][:-1], np.nan)
    if load.kind == "open":
        due = np.fmax(due, column(requests, "intended_start"))
    late = np.nan_to_num(send - due - np.nan_to_num(column(requests, "connect_s")))
    late = np.where(np.nan_to_num(column(requests, "retries")) > 0, 0.0, np.maximum(late, 0.0))
    late += _sending_s(requests)
    if load.kind == "open":
        return late
    total = np.cumsum(late[order])
    new = np.concatenate([[True], ~same]) if len(order) else np.empty(0, dtype=bool)
    before = np.repeat((total - late[order])[new], np.diff(np.flatnonzero(new), append=len(order)))
    shift = np.empty(len(order))
    shift[order] = total - before
    return shift


def _lags_of_packed_reads(seen: Timeline, lags: Floats) -> Floats:
    """Lags with those of events that were read together made longer: the kernel stamps only the last of them.

    Where the reader was late, the others are taken to have come one mean gap of their request before one another, but
    after the read before; where it was not, or the server packs events by itself, they came together.
    """
    if not len(lags):
        return lags
    reads = _Reads.of(seen, lags)
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
    def of(cls, seen: Timeline, lags: Floats) -> _Reads:
        starts = np.ones(len(seen.times), dtype=bool)
        starts[1:] = np.diff(seen.times) != 0
        starts[seen.first] = True
        begin = np.flatnonzero(starts)
        size = np.diff(begin, append=len(seen.times))
        request = np.searchsorted(seen.first, begin, side="right") - 1
        lag = lags[begin]
        # The read before, or the request itself where there was none.
        before = np.where(begin == seen.first[request], seen.send[request], seen.times[begin - 1])
        window = np.maximum(seen.times[begin] - lag - before, 0.0)
        ends = seen.times[np.append(seen.first[1:], len(seen.times)) - 1]
        mean_gap = (ends - seen.times[seen.first]) / np.maximum(seen.events - 1, 1)
        from_end = np.repeat(begin + size - 1, size) - np.arange(len(seen.times))
        return cls(size, lag, np.minimum(window / size, mean_gap[request]), from_end)
