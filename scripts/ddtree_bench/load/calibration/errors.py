"""The client's numbers against the server's own stamps, for a cell that the scripted server answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddtree_bench.load.calibration.process import RequestStamps, Stamps
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.metrics import cell_metrics, parse
from ddtree_bench.metrics.differences import Difference, Statistics, differences, statistics
from ddtree_bench.metrics.parsed import Request
from ddtree_bench.plan import Load


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
    differences : tuple of Difference
        Seen less true, the largest share of its limit first: s, or for throughputs a share of the true one.
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
    differences: tuple[Difference, ...] = field(repr=False)
    lag_s: Mapping[str, float]
    late_s: Mapping[str, float]

    def error(self, name: str) -> float | None:
        """The error of a statistic; None where neither side has it, infinite where only one has.

        ttft_mean_s, for example, is mean(client's TTFT) - mean(first send - arrival).
        """
        return next((one.value for one in self.differences if one.name == name), None)

    @property
    def worst(self) -> tuple[str, float]:
        """The statistic with the largest error as a share of its limit, and that share."""
        if not self.differences or self.matched < self.requests:
            return "requests that did not match", float("inf")
        return self.differences[0].name, self.differences[0].used


def compare(requests: pd.DataFrame, stamps: Stamps, schedule: Schedule, load: Load) -> Errors:
    """Return the errors of a cell's raw rows (columns of requests_table.SCHEMA) against the server's stamps."""
    pairs = [(one, stamps.requests.get(one.row["prompt_sha256"])) for one in parse(requests)]
    matched = [(one, own) for one, own in pairs if own is not None and _matches(one, own, schedule)]
    seen = [one for one, _ in matched]
    true = [_by_the_server(one, own) for one, own in matched]
    come, sent = _moments(seen), _moments(true)
    due = schedule.ttft_s + schedule.interval_s * np.arange(schedule.events)
    late = [own.sends[:-1] - own.arrived - due for _, own in matched]
    return Errors(
        requests=len(pairs),
        matched=len(matched),
        events=come.size,
        seen=statistics(cell_metrics(seen, load, None)),
        true=statistics(cell_metrics(true, load, None)),
        differences=differences(seen, true, load),
        lag_s=_spread(come - sent),
        late_s=_spread(np.concatenate([np.empty(0), *late])),
    )


def _matches(one: Request, stamps: RequestStamps, schedule: Schedule) -> bool:
    """Whether a request succeeded with every event that the server sent."""
    return one.answer is not None and one.answer.times.size == schedule.events == len(stamps.sends) - 1


def _by_the_server(one: Request, stamps: RequestStamps) -> Request:
    """The same request by the server's stamps."""
    assert one.answer is not None
    end = float(stamps.sends[-1])
    answer = replace(one.answer, t_send=stamps.arrived, times=stamps.sends[:-1], last=end)
    return replace(one, row={**one.row, "t_send": stamps.arrived, "t_end": end}, answer=answer)


def _moments(requests: Sequence[Request]) -> NDArray[np.float64]:
    """The token-bearing events of all requests, shape (M,)."""
    return np.concatenate([np.empty(0), *(one.answer.times for one in requests if one.answer is not None)])


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    if not values.size:
        return {}
    return {
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }
