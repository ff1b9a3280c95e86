"""The ok requests of a cell as flat arrays, and the statistics of a cell from them.

They exist to be computed twice, from what the client saw and from what it would have seen had it been faster, and only
their differences are of use: `cells.cell_metrics` gives the numbers that are reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddtree_bench.metrics.percentiles import nearest_rank, summary
from ddtree_bench.metrics.throughput import STEADY_LEAST_SHARE, WARM_UP_PERCENT, Window
from ddtree_bench.plan import Load

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Statistics = dict[str, float]
"""Values by name, such as "TTFT p99" (s) and "throughput" (tokens/s); without those that cannot be given."""

RATES = ("throughput", "steady throughput", "speed per user")


@dataclass(frozen=True)
class Timeline:
    """n requests and their M token-bearing events, moments in s.

    Attributes
    ----------
    send, end, last, intended : array of float, shape (n,)
        When each request was sent, when its stream ended, when its last event came (token-bearing or with the
        finish_reason), and its scheduled start, NaN for a closed loop.
    first : array of int, shape (n,)
        The index of its first event in `times`; it has one at least.
    times : array of float, shape (M,)
        The token-bearing events, request after request.
    tokens : array of int, shape (M,)
        Tokens that each event carried.
    """

    send: Floats = field(repr=False)
    end: Floats = field(repr=False)
    last: Floats = field(repr=False)
    intended: Floats = field(repr=False)
    first: Ints = field(repr=False)
    times: Floats = field(repr=False)
    tokens: Ints = field(repr=False)

    @property
    def events(self) -> Ints:
        """Token-bearing events of each request, shape (n,)."""
        return np.diff(self.first, append=len(self.times))


def statistics(timeline: Timeline, load: Load, complete: bool) -> Statistics:
    """Return the statistics of a cell; `complete` says whether all of its requests are in the timeline."""
    if not len(timeline.send):
        return {}
    counts, tokens = timeline.events, timeline.tokens
    total = np.add.reduceat(tokens, timeline.first)
    e1 = timeline.times[timeline.first]
    ttft, e2e = e1 - timeline.send, timeline.last - timeline.send
    decoded = total - tokens[timeline.first]
    gaps = np.delete(np.diff(timeline.times), timeline.first[1:] - 1)
    several = decoded > 0
    found = {
        **_distribution("TTFT", ttft),
        **_distribution("E2E", e2e),
        **_distribution("TPOT", (e2e - ttft)[several] / decoded[several]),
        **_distribution("ICL", gaps),
        **_distribution("ITL", *_itl(timeline, counts)),
        **_throughputs(timeline, total, _steady_window(timeline, load, complete)),
    }
    if np.all(e2e > 0):
        found["speed per user"] = float(np.mean(total / e2e))
    if not np.isnan(timeline.intended).any():
        found |= _distribution("TTFT from the intended start", e1 - timeline.intended)
        found |= _distribution("E2E from the intended start", timeline.last - timeline.intended)
    return found


def _distribution(name: str, values: Floats, weights: Ints | None = None) -> Statistics:
    """Mean and percentiles, those that may be given."""
    even = weights is None or not weights.size or weights.min() == weights.max()
    found = summary("", values, None if even else weights)
    return {f"{name} {key[1:].removesuffix('_s')}": value for key, value in found.items() if value is not None}


def _itl(timeline: Timeline, counts: Ints) -> tuple[Floats, Ints]:
    """The gap before each event that carries tokens, over its tokens, and these; first events have none."""
    carries = timeline.tokens > 0
    carries[timeline.first] = True
    ends, tokens = timeline.times[carries], timeline.tokens[carries]
    request = np.repeat(np.arange(len(counts)), counts)[carries]
    follows = request[1:] == request[:-1]
    return np.diff(ends)[follows] / tokens[1:][follows], tokens[1:][follows]


def _throughputs(timeline: Timeline, total: Ints, window: Window | None) -> Statistics:
    """Throughput full, and steady where the window holds enough to be used."""
    found = {}
    last_tokens = timeline.times[np.append(timeline.first[1:], len(timeline.times)) - 1]
    wall = last_tokens.max() - timeline.send.min()
    if wall > 0:
        found["throughput"] = float(total.sum() / wall)
    if window and window[1] > window[0]:
        inside = timeline.tokens[(timeline.times >= window[0]) & (timeline.times <= window[1])].sum()
        if inside >= STEADY_LEAST_SHARE * total.sum():
            found["steady throughput"] = float(inside / (window[1] - window[0]))
    return found


def _steady_window(timeline: Timeline, load: Load, complete: bool) -> Window | None:
    """The steady window as `throughput.steady_window` has it."""
    if load.kind == "closed":
        return _full_house(timeline.send, timeline.end, load.concurrency) if complete else None
    warm_up = nearest_rank(timeline.last - timeline.intended, WARM_UP_PERCENT)
    return None if warm_up is None else (float(timeline.intended.min()) + warm_up, float(timeline.intended.max()))


def _full_house(send: Floats, end: Floats, concurrency: int) -> Window | None:
    """The first and the last moment with `concurrency` requests in flight; None if there were never so many."""
    moments = np.concatenate([send, end])
    steps = np.repeat(np.array([1, -1]), [len(send), len(end)])
    order = np.lexsort((steps, moments))
    full = np.flatnonzero(np.cumsum(steps[order]) >= concurrency)
    return (float(moments[order][full[0]]), float(moments[order][full[-1] + 1])) if full.size else None


def flat(column: Any, kind: Any = float) -> NDArray[Any]:
    """Return the lists of a column one after another, shape (sum of their lengths,)."""
    lists = [np.asarray(one, dtype=kind) for one in column]
    return np.concatenate(lists) if lists else np.empty(0, dtype=kind)


def tokens_of_events(so_far: Floats, totals: Floats, first: Ints) -> Ints:
    """Tokens of each event from the continuous usage `so_far`; an equal share of the total where it is not known.

    Only ever compared with itself, so the shares need not be those of the reported metrics.
    """
    counts = np.diff(first, append=len(so_far))
    before = np.concatenate([[0.0], so_far[:-1]]) if len(so_far) else so_far
    before[first] = 0.0
    tokens = so_far - before
    known = np.logical_and.reduceat(tokens >= 0, first) if len(first) else np.empty(0, dtype=bool)
    position = np.arange(len(so_far)) - np.repeat(first, counts)
    share = np.repeat(np.nan_to_num(totals, nan=0.0) / np.maximum(counts, 1), counts)
    even = np.floor((position + 1) * share + 1e-9) - np.floor(position * share + 1e-9)
    return np.where(np.repeat(known, counts), tokens, even).astype(np.int64)


def column(requests: pd.DataFrame, name: str) -> Floats:
    """Return a column of numbers, NaN where it has none, shape (rows,)."""
    values: Floats = pd.to_numeric(requests[name]).to_numpy(dtype=float, na_value=np.nan)
    return values
