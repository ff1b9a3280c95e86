"""One calibration run: the client measures the scripted server like any other, and both accounts are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ddtree_bench.load import cell
from ddtree_bench.load.calibration.errors import Errors, compare
from ddtree_bench.load.calibration.process import ServerProcess
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.metrics.client_health import Health, health
from ddtree_bench.plan import Load, Workload


@dataclass(frozen=True)
class Trial:
    """A calibration run at one concurrency: the errors, the client's verdict on itself, and what it cost.

    `server_cpu_s` is the CPU time of the server over the run.
    """

    concurrency: int
    errors: Errors
    health: Health
    measurement: cell.Measurement = field(repr=False)
    server_cpu_s: float

    @property
    def cpu_us_per_event(self) -> float:
        """CPU time of the client's process for each token-bearing event, us."""
        return self._client("cpu_s") / max(self.errors.events, 1) * 1e6

    @property
    def cpu_share(self) -> float:
        """CPU time of the client's process, as a share of one core over the run."""
        return self._client("cpu_s") / self._client("wall_s")

    def _client(self, key: str) -> float:
        value = self.measurement.client[key]
        assert value is not None
        return float(value)


def calibrate(
    server: ServerProcess,
    concurrency: int,
    requests_per_user: int,
    stagger_s: float,
    abort: Callable[[], str | None] = lambda: None,
) -> Trial:
    """Measure the scripted server in a closed loop of `concurrency` users, their first requests `stagger_s` apart.

    `abort` is polled; the first reason that it returns ends the run.
    """
    load = Load(concurrency)
    asked = prompts(concurrency * requests_per_user)
    cpu_before = server.take_stamps().cpu_s
    work = workload(len(asked), server.schedule)
    measured = cell.measure(server.url, work, asked, load, "calibration", abort=abort, stagger_s=stagger_s)
    stamps = server.take_stamps()
    return Trial(
        concurrency=concurrency,
        errors=compare(measured.requests, stamps, server.schedule, load),
        health=health(measured.requests, measured.client, load),
        measurement=measured,
        server_cpu_s=stamps.cpu_s - cpu_before,
    )


def prompts(count: int) -> list[Prompt]:
    """Return prompts that differ, since the server keeps its stamps by the prompt."""
    return [Prompt(f"c{number}", number, "calibration", f"Calibration request {number}.") for number in range(count)]


def workload(n_prompts: int, schedule: Schedule) -> Workload:
    """Return the workload of a calibration run."""
    return Workload(
        name="calibration",
        prompts="",
        blocks=None,
        n_prompts=n_prompts,
        prompts_sha256="",
        max_tokens=schedule.tokens,
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        seed=0,
        ignore_eos=True,
        repeat_prompts=False,
        endpoint="chat",
    )
