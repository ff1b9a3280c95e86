"""The client's numbers against the server's own stamps, for a cell that the scripted server answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ddtree_bench.load.calibration.process import RequestStamps, Stamps
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.metrics.client_share import timeline
from ddtree_bench.metrics.timeline import RATES, Floats, Statistics, Timeline, statistics
from ddtree_bench.plan import Load

RATE_LIMIT = 0.01
LATENCY_LIMIT_S = 0.002


@dataclass(frozen=True)
class Errors:
    """What the client got wrong.

    Attributes
    ----------
    requests, matched : int
        Requests that were sent, and those of them that succeeded with every event that the server sent.
    events : int
        Token-bearing events of the latter.
    seen, true : dict
        Statistics from the client's and from the server's stamps: of the server, a request begins when the kernel
        had received it and an event comes when it was given to the kernel.
    lag_s : dict
        Time from sending to reading an event: p50, p99 and max, s.
    late_s : dict
        How late the server sent events against its schedule: p50, p99 and max, s. Part of no error.
    """

    requests: int
    matched: int
    events: int
    seen: Statistics = field(repr=False)
    true: Statistics = field(repr=False)
    lag_s: Mapping[str, float]
    late_s: Mapping[str, float]

    def error(self, name: str) -> float | None:
        """The error of a statistic, seen less true: s, or for a throughput as a share of the true one; None if absent.

        TTFT mean, for example, is mean(client's TTFT) - mean(first send - arrival).
        """
        if name not in self.seen or name not in self.true:
            return None
        difference = self.seen[name] - self.true[name]
        return difference / self.true[name] if name in RATES else difference

    @property
    def worst(self) -> tuple[str, float]:
        """The statistic with the largest error as a share of its limit (1 %, 2 ms), and that share."""
        shares = {
            name: abs(self.error(name) or 0.0) / (RATE_LIMIT if name in RATES else LATENCY_LIMIT_S)
            for name in self.seen
            if name in self.true
        }
        if not shares or self.matched < self.requests:
            return "requests that did not match", float("inf")
        name = max(shares, key=lambda one: shares[one])
        return name, shares[name]


def compare(requests: pd.DataFrame, stamps: Stamps, schedule: Schedule, load: Load) -> Errors:
    """Return the errors of a cell's raw rows (columns of requests_table.SCHEMA) against the server's stamps."""
    server = [stamps.requests.get(digest) for digest in requests["prompt_sha256"]]
    matched = [
        status == "ok" and one is not None and list(kinds).count("token") == schedule.events == len(one.sends) - 1
        for status, kinds, one in zip(requests["status"], requests["event_kinds"], server, strict=True)
    ]
    seen = timeline(requests[np.array(matched, dtype=bool)])
    true = _by_the_server(seen, [one for one, fits in zip(server, matched, strict=True) if fits and one], schedule)
    complete = all(matched)
    due = schedule.ttft_s + schedule.interval_s * np.arange(schedule.events)
    late = (true.times.reshape(-1, schedule.events) - true.send[:, None] - due).ravel()
    return Errors(
        requests=len(requests),
        matched=sum(matched),
        events=len(seen.times),
        seen=statistics(seen, load, complete),
        true=statistics(true, load, complete),
        lag_s=_spread(seen.times - true.times),
        late_s=_spread(late),
    )


def _by_the_server(seen: Timeline, stamps: list[RequestStamps], schedule: Schedule) -> Timeline:
    """The same requests by the server's stamps."""
    sends = np.array([one.sends for one in stamps], dtype=float).reshape(-1, schedule.events + 1)
    end = sends[:, -1]
    send = np.array([one.arrived for one in stamps], dtype=float)
    return replace(seen, send=send, end=end, last=end, times=sends[:, :-1].ravel())


def _spread(values: Floats) -> dict[str, float]:
    if not values.size:
        return {}
    return {
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }
