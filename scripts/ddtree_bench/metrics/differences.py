"""How far two accounts of one cell are apart, statistic by statistic, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddtree_bench.metrics.cells import Scalars, cell_metrics
from ddtree_bench.metrics.parsed import Request
from ddtree_bench.metrics.percentiles import GIVEN
from ddtree_bench.metrics.slos import Slos
from ddtree_bench.metrics.throughput import PEAK_WINDOW_S, peak_throughput
from ddtree_bench.plan import Load

RATE_LIMIT = 0.01
"""Most that the client may take from, or add to, a speed, as a share of it."""

LATENCY_LIMIT_S = 0.002
"""Most that the client may add to a latency, s."""

CLOCK_S = 20e-6
"""What stamps of the kernel and of the client cannot tell apart, s."""

PEAK = "peak_throughput_tok_s"
STEADY = "throughput_steady_tok_s"
RATES = ("throughput_full_tok_s", STEADY, PEAK, "user_speed_tok_s", "requests_per_s", "goodput_req_s")
"""Statistics whose difference is a share of them."""

SPEEDS = ("tpot_mean_s", "tpot_p50_s", "itl_mean_s", "itl_p50_s", "decode_s_per_token")
"""Times that stand for the speed of a stream: the limit is a share of them, however short they are."""

LATENCIES = tuple(
    f"{name}_{one}_s"
    for name in ("ttft", "e2e", "ttft_from_intended", "e2e_from_intended", "tpot", "itl", "icl")
    for one in ("mean", *(f"p{percent}" for percent in GIVEN))
)

NAMES = (*RATES, *LATENCIES, "decode_s_per_token")
"""The statistics that are compared; `definitions.CELL` says what each is."""

Statistics = dict[str, float]
"""Values by name, without those that cannot be given."""


@dataclass(frozen=True)
class Difference:
    """What one account has more of a statistic than another, and the most that it may: s, or for RATES a share.

    Infinite where only one of them can give the statistic.
    """

    name: str
    value: float
    limit: float

    @property
    def used(self) -> float:
        """The difference as a share of its limit."""
        return abs(self.value) / self.limit

    @property
    def is_rate(self) -> bool:
        """Whether it is a share and no time."""
        return self.name in RATES

    def __str__(self) -> str:
        """The difference in words."""
        if math.isinf(self.value):
            return f"whether there is a {self.name}"
        if self.is_rate:
            return f"{abs(self.value):.2%} of {self.name} (limit {self.limit:.0%})"
        return f"{abs(self.value) * 1e3:.3g} ms of {self.name} (limit {self.limit * 1e3:.3g} ms)"


def statistics(cell: Scalars) -> Statistics:
    """Return those of a cell's metrics that are compared and known.

    The steady throughput is one of them only where figures use it: over a short window it says nothing.
    """
    known = ((name, _value(cell, name)) for name in _compared(cell))
    return {name: value for name, value in known if value is not None}


def differences(
    seen: Sequence[Request], true: Sequence[Request], load: Load, slos: Slos | None = None, cell: Scalars | None = None
) -> tuple[Difference, ...]:
    """Return how far two accounts of the same requests are apart, the largest share of a limit first.

    `cell` has the metrics of `seen` where they were computed before. A statistic that only one account can give counts
    as infinitely far.
    """
    ours = cell_metrics(seen, load, None, slos) if cell is None else cell
    theirs = cell_metrics(true, load, None, slos)
    found = [_difference(name, _value(ours, name), _value(theirs, name)) for name in _compared(ours)]
    found = [_of_peak(one, ours, theirs, true) if one and one.name == PEAK else one for one in found]
    found = [_of_steady(one, theirs, true) if one and one.name == STEADY else one for one in found]
    return tuple(sorted((one for one in found if one), key=lambda one: one.used, reverse=True))


def _compared(cell: Scalars) -> list[str]:
    return [name for name in NAMES if name != STEADY or cell["throughput_window"] == "steady"]


def _value(cell: Scalars, name: str) -> float | None:
    value = cell[name]
    return None if value is None else float(value)


def _difference(name: str, seen: float | None, true: float | None) -> Difference | None:
    if seen is None and true is None:
        return None
    if seen is None or true is None:
        return Difference(name, math.inf, RATE_LIMIT if name in RATES else LATENCY_LIMIT_S)
    if name in RATES:
        return Difference(name, _share(seen, true), RATE_LIMIT)
    limit = max(RATE_LIMIT * true, CLOCK_S) if name in SPEEDS else LATENCY_LIMIT_S
    return Difference(name, seen - true, limit)


def _share(seen: float, true: float) -> float:
    return 0.0 if seen == true else seen / true - 1 if true > 0 else math.inf


def _of_steady(found: Difference, theirs: Scalars, true: Sequence[Request]) -> Difference:
    """The difference of a steady throughput, from what an event at each edge of its window can hold.

    The window opens with a send and closes with an end, so microseconds decide whether an event of another user is
    inside; the full throughput, which has no such edges, is compared beside it.
    """
    rate, window = _value(theirs, STEADY), _value(theirs, "steady_window_s")
    if math.isinf(found.value) or not rate or not window:
        return found
    largest = max(
        int(one.answer.tokens.counts.max()) for one in true if one.answer and one.answer.tokens.counts is not None
    )
    beyond = max(0.0, abs(found.value) - 2 * largest / (rate * window))
    return replace(found, value=math.copysign(beyond, found.value))


def _of_peak(found: Difference, ours: Scalars, theirs: Scalars, true: Sequence[Request]) -> Difference:
    """The difference of a peak, from that of windows which are longer, or shorter, by a gap between events.

    Microseconds decide whether the events at the very edge of a window are inside, and a server sends to all users at
    once: a peak is no finer than that.
    """
    if abs(found.value) <= found.limit / 2 or math.isinf(found.value):
        return found
    seen, gap = _value(ours, PEAK) or 0.0, max(_value(theirs, "icl_mean_s") or 0.0, LATENCY_LIMIT_S)
    answers = [one.answer for one in true if one.answer is not None]
    times = np.concatenate([given.times for given in answers])
    tokens = np.concatenate([given.tokens.counts for given in answers if given.tokens.counts is not None])
    window = max(PEAK_WINDOW_S + math.copysign(gap, found.value), LATENCY_LIMIT_S)
    bound = peak_throughput(times * (PEAK_WINDOW_S / window), tokens)
    beyond = (seen > bound) == (found.value > 0)
    return replace(found, value=_share(seen, bound) if beyond else 0.0)
