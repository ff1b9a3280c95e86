"""Does the client know when it is wrong? Calibration runs, half of them disturbed, in random order.

    python tests/benchmarks/client_health_verdicts.py [--runs 20] [--concurrency 1 64 128 256]

Of the disturbed runs one half has two CPU hogs beside it, the other a reading thread that computes for 1.5 ms with each
read, as an expensive decryption would. A run is wrong when a statistic is off by more than its limit
(metrics/differences.py) against the server's stamps. Exits with 1 when a run was called healthy and was wrong, with the
kernel's receive stamps or without them (from the same data), or fewer than 8 of 10 quiet runs were called healthy with
them. Without them the client may say that it cannot tell.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ddtree_bench.load import reader
from ddtree_bench.load.calibration.process import ServerProcess, calibration_server
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.load.calibration.trial import Trial, calibrate
from ddtree_bench.metrics.client_health import health
from ddtree_bench.plan import Load

HOG = "while True: pass"
LEAST_HEALTHY = 0.8
QUIET, HOGS, SLOW = "quiet", "hogs", "slow reader"


@dataclass(frozen=True)
class Verdict:
    """One run: what disturbed it, what the client said with and without stamps, and the worst true error."""

    disturbance: str
    healthy: bool | None
    healthy_without_stamps: bool | None
    worst: str
    used: float

    @property
    def wrong(self) -> bool:
        """Whether an error was above its limit."""
        return self.used > 1


@contextmanager
def hogs(count: int, priority: int | None) -> Iterator[None]:
    """Run `count` processes that never rest; with a priority, each is a session of its own that has this nice value."""
    running = [
        subprocess.Popen([sys.executable, "-c", HOG], start_new_session=priority is not None) for _ in range(count)
    ]
    try:
        if priority is not None:
            for process in running:
                # Linux shares the CPU among sessions first (sched(7), autogroup), then among their processes.
                Path(f"/proc/{process.pid}/autogroup").write_text(str(priority))
                os.setpriority(os.PRIO_PROCESS, process.pid, priority)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def slow_reads(work_s: float) -> Iterator[None]:
    """Let the reading thread compute for `work_s` with every read."""
    init = reader.Reading.__init__

    def slow_init(self: reader.Reading, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        receive = self.receive

        def slow_receive(most: int, ancillary: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
            received, until = receive(most, ancillary), time.perf_counter() + work_s
            while time.perf_counter() < until:
                pass
            return received

        self.receive = slow_receive

    reader.Reading.__init__ = slow_init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        reader.Reading.__init__ = init  # type: ignore[method-assign]


def judge(trial: Trial, disturbance: str) -> Verdict:
    """The verdicts on a run, and the truth."""
    requests = trial.measurement.requests
    unknown = [np.full(len(lags), np.nan, np.float32) for lags in requests["event_lags"]]
    blind = requests.assign(event_lags=unknown, end_lag=np.nan)
    name, used = trial.errors.worst
    return Verdict(
        disturbance=disturbance,
        healthy=trial.health.ok,
        healthy_without_stamps=health(blind, trial.measurement.client, Load(trial.concurrency)).ok,
        worst=name,
        used=used,
    )


def line(number: int, trial: Trial, verdict: Verdict) -> str:
    """A run in words."""
    errors, own = trial.errors, trial.health.errors[0] if trial.health.errors else "nothing known"
    figures = [("ttft_mean_s", 1e3, "ms"), ("itl_mean_s", 1e3, "ms"), ("throughput_full_tok_s", 100, "%")]
    true = ", ".join(f"{name} {(errors.error(name) or 0.0) * scale:+.3f} {unit}" for name, scale, unit in figures)
    said = {True: "healthy", False: "unhealthy", None: "unknown"}
    kept, busy = (
        "unknown" if share is None else f"{share:.1%}"
        for share in (trial.health.reader.waiting, trial.health.reader.busy)
    )
    return (
        f"{number:2d} {verdict.disturbance:11s} C={trial.concurrency:<3d} {said[verdict.healthy]:9s} "
        f"(without stamps {said[verdict.healthy_without_stamps]:9s}) {'WRONG' if verdict.wrong else 'right'} "
        f"worst in truth {verdict.worst} at {verdict.used:.0%} of its limit; {true}; own account: {own}; "
        f"kept from a CPU: {kept}, busy: {busy}"
    )


def run(server: ServerProcess, plan: Sequence[tuple[str, int]], options: argparse.Namespace) -> list[Verdict]:
    """Make the runs of a plan, pairs of (disturbance, concurrency)."""
    verdicts = []
    for number, (disturbance, concurrency) in enumerate(plan, 1):
        slow = slow_reads(options.slow_ms / 1e3) if disturbance == SLOW else nullcontext()
        with hogs(options.hogs if disturbance == HOGS else 0, options.hog_priority), slow:
            trial = calibrate(server, concurrency, options.requests_per_user, options.stagger_ms / 1e3)
        verdicts.append(judge(trial, disturbance))
        print(line(number, trial, verdicts[-1]), flush=True)
    return verdicts


def summary(name: str, verdicts: Sequence[Verdict], least_healthy: float) -> bool:
    """Print the counts of a verdict; return whether none was wrong and enough quiet runs were healthy."""
    wrong = sum(v.healthy is True and v.wrong for v in verdicts)
    quiet = [v for v in verdicts if v.disturbance == QUIET]
    healthy = sum(v.healthy is True for v in quiet)
    quiet_wrong, alarms = sum(v.wrong for v in quiet), sum(v.healthy is not True and not v.wrong for v in verdicts)
    print(
        f"{name}: healthy and wrong {wrong} of {len(verdicts)}; healthy {healthy} of {len(quiet)} quiet runs "
        f"({quiet_wrong} of them wrong); not healthy and right {alarms}"
    )
    return wrong == 0 and healthy >= least_healthy * len(quiet)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--stagger-ms", type=float, default=8.0)
    parser.add_argument("--hogs", type=int, default=2, help="processes that never rest, in a quarter of the runs")
    parser.add_argument("--hog-priority", type=int, metavar="NICE", help="their nice value; below 0 needs root")
    parser.add_argument("--slow-ms", type=float, default=1.5, help="work of a slow reader with each read")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    order = random.Random(options.seed)
    disturbances = (QUIET, HOGS, QUIET, SLOW)
    plan = [
        (disturbances[n % 4], options.concurrency[(n // 2 + n // 8) % len(options.concurrency)])
        for n in range(options.runs)
    ]
    order.shuffle(plan)
    with calibration_server(Schedule(events=options.events)) as server:
        verdicts = run(server, plan, options)
    blind = [replace(verdict, healthy=verdict.healthy_without_stamps) for verdict in verdicts]
    met = [summary("with the kernel's stamps", verdicts, LEAST_HEALTHY), summary("without", blind, 0.0)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
