"""Does the client know when it is wrong? Calibration runs, half of them with two CPU hogs beside, in random order.

    python tests/benchmarks/client_health_verdicts.py [--runs 20] [--concurrency 1 64 128 256]

A run is wrong when its throughput is off by more than 1 % or a statistic of its latencies by more than 2 ms, against
the server's stamps. Exits with 1 when a run was called healthy and was wrong, or fewer than 8 of 10 quiet runs were
called healthy. The verdict without the kernel's receive stamps is printed beside it, from the same data.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from ddtree_bench.load.calibration.process import ServerProcess, calibration_server
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.load.calibration.trial import Trial, calibrate
from ddtree_bench.metrics.client_health import health
from ddtree_bench.plan import Load

HOG = "while True: pass"
LEAST_HEALTHY = 0.8


@dataclass(frozen=True)
class Verdict:
    """One run: whether hogs ran beside it, what the client said with and without stamps, and the worst true error."""

    hogs: bool
    healthy: bool | None
    healthy_without_stamps: bool | None
    worst: str
    used: float

    @property
    def wrong(self) -> bool:
        """Whether an error was above its limit."""
        return self.used > 1


@contextmanager
def hogs(count: int, own_session: bool) -> Iterator[None]:
    """Keep `count` CPUs busy; with sessions of their own, autogroups give each of them as much CPU as all of this."""
    running = [subprocess.Popen([sys.executable, "-c", HOG], start_new_session=own_session) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def judge(trial: Trial, with_hogs: bool) -> Verdict:
    """The verdicts on a run, and the truth."""
    requests = trial.measurement.requests
    blind = requests.assign(event_lags=[np.full(len(lags), np.nan, np.float32) for lags in requests["event_lags"]])
    name, used = trial.errors.worst
    return Verdict(
        hogs=with_hogs,
        healthy=trial.health.ok,
        healthy_without_stamps=health(blind, trial.measurement.client, Load(trial.concurrency)).ok,
        worst=name,
        used=used,
    )


def line(number: int, trial: Trial, verdict: Verdict) -> str:
    """A run in words."""
    errors, own = trial.errors, trial.health.errors[0] if trial.health.errors else "nothing known"
    figures = [("TTFT mean", 1e3, "ms"), ("ITL mean", 1e3, "ms"), ("throughput", 100, "%")]
    true = ", ".join(f"{name} {(errors.error(name) or 0.0) * scale:+.3f} {unit}" for name, scale, unit in figures)
    said = {True: "healthy", False: "unhealthy", None: "unknown"}
    kept = "unknown" if trial.health.waiting is None else f"{trial.health.waiting:.1%}"
    return (
        f"{number:2d} {'hogs ' if verdict.hogs else 'quiet'} C={trial.concurrency:<3d} {said[verdict.healthy]:9s} "
        f"(without stamps {said[verdict.healthy_without_stamps]:9s}) {'WRONG' if verdict.wrong else 'right'} "
        f"worst in truth {verdict.worst} at {verdict.used:.0%} of its limit; {true}; own account: {own}; "
        f"kept from a CPU: {kept}"
    )


def run(server: ServerProcess, plan: Sequence[tuple[bool, int]], options: argparse.Namespace) -> list[Verdict]:
    """Make the runs of a plan, pairs of (with hogs, concurrency)."""
    verdicts = []
    for number, (with_hogs, concurrency) in enumerate(plan, 1):
        with hogs(2 if with_hogs else 0, options.own_session):
            trial = calibrate(server, concurrency, options.requests_per_user, options.stagger_ms / 1e3)
        verdicts.append(judge(trial, with_hogs))
        print(line(number, trial, verdicts[-1]), flush=True)
    return verdicts


def summary(name: str, verdicts: Sequence[Verdict]) -> bool:
    """Print the counts of a verdict; return whether the bars are met."""
    wrong = sum(v.healthy is True and v.wrong for v in verdicts)
    quiet = [v for v in verdicts if not v.hogs]
    healthy = sum(v.healthy is True for v in quiet)
    quiet_wrong, alarms = sum(v.wrong for v in quiet), sum(v.healthy is not True and not v.wrong for v in verdicts)
    print(
        f"{name}: healthy and wrong {wrong} of {len(verdicts)}; healthy {healthy} of {len(quiet)} quiet runs "
        f"({quiet_wrong} of them wrong); not healthy and right {alarms}"
    )
    return wrong == 0 and healthy >= LEAST_HEALTHY * len(quiet)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--stagger-ms", type=float, default=8.0)
    parser.add_argument("--own-session", action="store_true", help="start the hogs in sessions of their own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    order = random.Random(options.seed)
    # Each concurrency as often with hogs as without.
    plan = [(n % 2 == 1, options.concurrency[n // 2 % len(options.concurrency)]) for n in range(options.runs)]
    order.shuffle(plan)
    with calibration_server(Schedule(events=options.events)) as server:
        verdicts = run(server, plan, options)
    blind = [replace(verdict, healthy=verdict.healthy_without_stamps) for verdict in verdicts]
    met = summary("with the kernel's stamps", verdicts)
    summary("without", blind)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
