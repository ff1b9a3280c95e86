"""Whether the client itself could explain what was measured: its own error in each statistic, against a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from ddtree_bench.metrics.client_share import client_share
from ddtree_bench.metrics.timeline import RATES, statistics
from ddtree_bench.plan import Load

RATE_LIMIT = 0.01
"""Most that the client may take from, or add to, a throughput, as a share of it."""

LATENCY_LIMIT_S = 0.002
"""Most that the client may add to a statistic of latencies, s."""

SAFE_SHARE = 0.8
"""Share of a limit that the estimate may reach: what it cannot see, such as the way into the kernel, comes on top."""

SAFE_SHARE_OF_SAMPLE = 0.5
"""The same where the lags of more than half of the events are taken from others: a sample can miss what was worst."""

WAKE_S = 10e-6
"""What a thread waits for a CPU each time it is woken, even if nothing else wants one."""

WAIT_LIMIT = 0.005
"""Share of the wall time that the reading thread may have waited for a CPU beyond that, where lags are not known: what
comes meanwhile is less than moves a 99th percentile."""

KNOWN_SHARE = 0.05
"""Share of the events whose lag must be known to judge by lags."""


@dataclass(frozen=True)
class OwnError:
    """The client's own error in one statistic: seconds, or for a throughput its share; and the limit in that unit."""

    name: str
    value: float
    limit: float

    @property
    def used(self) -> float:
        """The error as a share of its limit."""
        return self.value / self.limit

    @property
    def is_rate(self) -> bool:
        """Whether it is the error of a throughput."""
        return self.name in RATES

    def __str__(self) -> str:
        """The error in words."""
        if self.is_rate:
            return f"{self.value:.2%} of {self.name} (limit {self.limit:.0%})"
        return f"{self.value * 1e3:.2f} ms of {self.name} (limit {self.limit * 1e3:g} ms)"


@dataclass(frozen=True)
class Health:
    """The client's own error in every statistic, the worst first.

    `known` is the share of events whose lag is known. `waiting` is the share of the time that the reading thread was
    kept from a CPU by others, None where the kernel does not say.
    """

    errors: tuple[OwnError, ...]
    known: float
    waiting: float | None

    @property
    def ok(self) -> bool | None:
        """Whether the numbers can be trusted; None where nothing says so or not."""
        if not self.errors:
            return None
        sampled = KNOWN_SHARE <= self.known < 0.5
        sampled = KNOWN_SHARE <= self.known <= 1 / 2
        if self.errors[0].used > (SAFE_SHARE_OF_SAMPLE if sampled else SAFE_SHARE):
            return False
        if self.known >= KNOWN_SHARE:
            return True
        return None if self.waiting is None else self.waiting <= WAIT_LIMIT

    @property
    def detail(self) -> str:
        """What the verdict rests on, the worst number first."""
        if not self.errors:
            return "no request succeeded"
        worst = f"the client's own share is at most {self.errors[0]}"
        if self.known >= KNOWN_SHARE:
            return f"{worst}; by the kernel's receive stamps of {self.known:.0%} of the events"
        if self.waiting is None:
            return f"{worst} by when requests were sent; how late events were read is not known on this system"
        waited = (
            f"others kept the reading thread from a CPU for {self.waiting:.1%} of the time (limit {WAIT_LIMIT:.1%})"
        )
        return f"{waited}; {worst} by when requests were sent"


def health(requests: pd.DataFrame, client: Mapping[str, float | int | bool | None], load: Load) -> Health:
    """Return the client's own error in every statistic of a cell.

    Each statistic is computed twice, from what the client saw and from the same without its share (`client_share`), and
    the difference is its error. Where the kernel gave no receive stamps (TLS, other systems) the part of the time
    that the reading thread waited for a CPU stands for how late events were read.

    Parameters
    ----------
    requests : DataFrame
        Raw rows of the cell, columns as in requests_table.SCHEMA.
    client : mapping
        The client's record, keys as in load.cell.Measurement.client.
    load : Load
        The load point.
    """
    share = client_share(requests, load)
    complete = bool((requests["status"] == "ok").all())
    seen, without = (statistics(one, load, complete) for one in (share.seen, share.without_client))
    errors = [_error(name, seen[name], without[name]) for name in seen if name in without]
    errors.sort(key=lambda error: error.used, reverse=True)
    return Health(tuple(errors), share.known, _waiting(client))


def _error(name: str, seen: float, without: float) -> OwnError:
    if name in RATES:
        return OwnError(name, abs(seen / without - 1) if without > 0 else math.inf, RATE_LIMIT)
    return OwnError(name, abs(seen - without), LATENCY_LIMIT_S)


def _waiting(client: Mapping[str, float | int | bool | None]) -> float | None:
    waited, slices, wall = (client.get(key) for key in ("reader_wait_s", "reader_slices", "wall_s"))
    if waited is None or slices is None or not wall:
        return None
    return max(waited - slices * WAKE_S, 0.0) / wall
