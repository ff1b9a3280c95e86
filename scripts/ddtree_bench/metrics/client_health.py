"""Whether the client itself could explain what was measured: its own error in each statistic, against a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_bench.metrics.cells import Scalars
from ddtree_bench.metrics.client_share import Floats, client_share
from ddtree_bench.metrics.differences import LATENCY_LIMIT_S, Difference, differences
from ddtree_bench.metrics.parsed import Requests, parse
from ddtree_bench.metrics.slos import Slos
from ddtree_bench.plan import Load

Record = Mapping[str, float | int | bool | None]
"""The client's record of itself, keys as in load.cell.Measurement.client."""

Spread = Mapping[str, float | None]
"""p50, p99 and max of times, s; None where no time is known."""

SAFE_SHARE = 0.8
"""Share of a limit that the estimate may reach: what it cannot see, such as the way into the kernel, comes on top."""

KNOWN_SHARE = 0.95
"""Share of the events whose lag must be known to judge by lags alone."""

WAKE_S = 10e-6
"""What a thread waits for a CPU each time it is woken, even if nothing else wants one."""

WAIT_LIMIT = 0.005
"""Share of the wall time that the reading thread may have waited for a CPU beyond that, where lags are not known: what
comes meanwhile is less than moves a 99th percentile."""

BUSY_LIMIT = 0.3
"""CPU time of the client's threads, which share one interpreter lock, as a share of the wall time, where lags are not
known: above it reads wait for one another and for other threads."""

SATURATED = 0.9
"""Share from which they certainly do."""


@dataclass(frozen=True)
class Reader:
    """How the reading thread fared; None where the kernel does not say.

    `waiting` is the share of the wall time that others kept it from a CPU, `busy` the CPU time of all threads of the
    client as such a share, and `burst_s` how long it takes to read one event of each user.
    """

    waiting: float | None
    busy: float | None
    burst_s: float | None

    @property
    def in_time(self) -> bool | None:
        """Whether it read in time by what it did; None where that cannot be told."""
        if self.waiting is None or self.busy is None:
            return None
        if self.waiting > WAIT_LIMIT or self.busy > SATURATED:
            return False
        burst_is_short = self.burst_s is not None and self.burst_s <= SAFE_SHARE * LATENCY_LIMIT_S
        return True if self.busy <= BUSY_LIMIT and burst_is_short else None

    def __str__(self) -> str:
        """The numbers in words."""
        if self.waiting is None or self.busy is None:
            return "how late events were read is not known on this system"
        burst = "unknown" if self.burst_s is None else f"{self.burst_s * 1e3:.2g} ms"
        return (
            f"without the kernel's stamps: the reading thread was kept from a CPU for {self.waiting:.1%} of the time "
            f"(limit {WAIT_LIMIT:.1%}), the client was busy for {self.busy:.0%} (limit {BUSY_LIMIT:.0%}), and an event "
            f"of every user takes it {burst} (limit {SAFE_SHARE * LATENCY_LIMIT_S * 1e3:.2g} ms)"
        )


@dataclass(frozen=True)
class Health:
    """The client's own error in every statistic, the worst first.

    `known` is the share of events whose lag is known, `event_lag_s` their spread, and `send_late_s` that of how late
    requests were sent.
    """

    errors: tuple[Difference, ...]
    known: float
    event_lag_s: Spread
    send_late_s: Spread
    reader: Reader

    @property
    def ok(self) -> bool | None:
        """Whether the numbers can be trusted; None where nothing says so or not."""
        if not self.errors:
            return None
        if self.errors[0].used > SAFE_SHARE:
            return False
        return True if self.known >= KNOWN_SHARE else self.reader.in_time

    @property
    def detail(self) -> str:
        """What the verdict rests on, the worst number first."""
        if not self.errors:
            return "no request succeeded"
        worst = f"the client's own share is at most {self.errors[0]}"
        if self.known >= KNOWN_SHARE:
            return f"{worst}; by the kernel's receive stamps of {self.known:.0%} of the events"
        return f"{worst} by when requests were sent; {self.reader}"

    @property
    def numbers(self) -> dict[str, Any]:
        """The same as JSON has it, by the names of metrics.json."""
        return {
            "lags_known": self.known,
            "event_lag_s": dict(self.event_lag_s),
            "send_late_s": dict(self.send_late_s),
            "own_error": {one.name: {"value": one.value, "limit": one.limit} for one in self.errors},
        }


def health(
    requests: Requests, client: Record, load: Load, slos: Slos | None = None, *, cell: Scalars | None = None
) -> Health:
    """Return the client's own error in every statistic of a cell.

    Each statistic is computed twice, from what the client saw and from the same without its share (`client_share`), and
    the difference is its error. Where the kernel gave no receive stamps (TLS, other systems) what the reading thread
    did stands for how late events were read.

    Parameters
    ----------
    requests : DataFrame or parsed requests
        Raw rows of the cell, columns as in requests_table.SCHEMA, or what `parse` made of them.
    client : mapping
        The client's record, keys as in load.cell.Measurement.client.
    load : Load
        The load point.
    slos : Slos, optional
        The objectives of goodput.
    cell : mapping, optional
        The metrics of the cell, where cell_metrics was called before.
    """
    parsed = parse(requests)
    share = client_share(parsed, load)
    return Health(
        errors=differences(share.seen, share.without_client, load, slos, cell) if share.lags.size else (),
        known=share.known,
        event_lag_s=_spread(share.lags[~np.isnan(share.lags)]),
        send_late_s=_spread(share.late),
        reader=_reader(client, min(load.concurrency, len(parsed))),
    )


def _spread(values: Floats) -> Spread:
    if not values.size:
        return dict.fromkeys(("p50", "p99", "max"))
    p50, p99 = np.percentile(values, [50, 99], method="inverted_cdf")
    return {"p50": float(p50), "p99": float(p99), "max": float(values.max())}


def _reader(client: Record, users: int) -> Reader:
    names = ("wall_s", "reader_wait_s", "reader_slices", "cpu_s", "reader_cpu_s", "events_read")
    wall, waited, slices, cpu, own_cpu, reads = (client.get(name) for name in names)
    return Reader(
        waiting=None if not wall or waited is None or slices is None else max(waited - slices * WAKE_S, 0.0) / wall,
        busy=None if not wall or cpu is None else cpu / wall,
        burst_s=None if not reads or own_cpu is None else users * own_cpu / reads,
    )
