"""`calibrate`: how exact the client is on this machine, against a scripted server that stamps what it sends."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ddtree_bench.load.calibration.process import calibration_server
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.load.calibration.trial import Trial, calibrate
from ddtree_bench.measuring import argument_types as types
from ddtree_bench.measuring.ending import EndRequest
from ddtree_bench.measuring.measured_folder import plain
from ddtree_bench.metrics.differences import RATE_LIMIT, Difference
from ddtree_bench.records.files import write_json

TTFT, ITL, THROUGHPUT = "ttft_mean_s", "itl_mean_s", "throughput_full_tok_s"

LIMITS = {TTFT: 0.0015, ITL: 0.0001, THROUGHPUT: RATE_LIMIT}
"""Largest error of the client, s, or for the throughput a share of it. Latencies may be off by less here than anywhere
else: the server is regular and near."""

FILE = "calibration.json"
WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`."""
    parser.epilog = (
        "Exit status: 0 when every error is within its limit, 1 when one is not or the run was ended early, "
        "2 for wrong arguments or a DIR that cannot be written."
    )
    add = parser.add_argument
    add("--concurrency", type=types.count, nargs="+", default=[1, 64, 128, 256], metavar="C", help="users, row by row")
    add("--ttft-ms", type=types.number(0), default=100.0, metavar="T", help="time to the first event")
    add("--interval-ms", type=types.number(0, above=True), default=20.0, metavar="T", help="time between events")
    add("--events", type=types.count, default=100, metavar="N", help="events of an answer")
    add("--tokens-per-event", type=types.count, default=1, metavar="N", help="tokens in each")
    add("--requests-per-user", type=types.count, default=2, metavar="N", help="requests of each user")
    add("--stagger-ms", type=types.number(0), default=8.0, metavar="T", help="time between the users' first requests")
    add("--out", type=Path, metavar="DIR", help=f"also write every number to DIR/{FILE}")


def run(parsed: argparse.Namespace) -> int:
    """Calibrate, with a line a trial, print a table and return the exit status.

    0 when every error is within its limit, whatever the client says about itself; 1 when one is not, or the user ended
    it early; 2 when DIR cannot be written.
    """
    try:
        _prepare(parsed.out)
    except OSError as error:
        print(f"error: --out {parsed.out}: cannot be written ({error.strerror}); give another", file=sys.stderr)
        return 2
    trials = []
    with EndRequest() as end:
        for trial in _trials(parsed, end):
            trials.append(trial)
            print(_line(trial), file=sys.stderr, flush=True)
    if trials:
        Console(width=WIDTH).print(table(trials), *explanation(trials), sep="\n")
    if parsed.out and trials:
        write_json(parsed.out / FILE, plain([record(trial) for trial in trials]))
    if end.reason():
        print(f"ended early: {end.reason()}; {len(trials)} of {len(parsed.concurrency)} trials done", file=sys.stderr)
        return 1
    return 0 if all(within_limits(trial) for trial in trials) else 1


def _prepare(folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return


def _trials(parsed: argparse.Namespace, end: EndRequest) -> Iterator[Trial]:
    """Trials one after another until the user ends them; the one that was broken off is left out."""
    schedule = Schedule(
        ttft_s=parsed.ttft_ms / 1e3,
        interval_s=parsed.interval_ms / 1e3,
        events=parsed.events,
        tokens_per_event=parsed.tokens_per_event,
    )
    with calibration_server(schedule) as server:
        for users in parsed.concurrency:
            trial = calibrate(server, users, parsed.requests_per_user, parsed.stagger_ms / 1e3, end.reason)
            if end.reason():
                return
            yield trial


def _line(trial: Trial) -> str:
    name, used = trial.errors.worst
    within = "within the limits" if within_limits(trial) else "NOT within the limits"
    return f"{trial.concurrency} users: {within}; largest error: {name}, {used:.0%} of what makes a client unhealthy"


def within_limits(trial: Trial) -> bool:
    """Whether every request succeeded and each error of LIMITS is known and within its limit."""
    errors = [(trial.errors.error(name), limit) for name, limit in LIMITS.items()]
    known = all(error is not None and abs(error) <= limit for error, limit in errors)
    return known and trial.errors.matched == trial.errors.requests


def table(trials: Sequence[Trial]) -> Table:
    """Return a row a trial: the client's errors, what it says about itself, and what it cost."""
    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="The client's errors against the server's own stamps",
        title_justify="left",
    )
    for heading in (
        *("users", "events", "TTFT\nmean\nms", "ITL\nmean\nms", "through\n-put\n%", "lag\np50\nms", "lag\np99\nms"),
        *("CPU\nµs/event", "CPU\n% of a\ncore", "reader's\nwait\n% of time", "server\nlate p99\nms"),
    ):
        made.add_column(heading, justify="right")
    for heading in ("healthy", "worst error, by\nits own account", "the same\nin truth", "within\nlimits"):
        made.add_column(heading, no_wrap=True)
    for trial in trials:
        made.add_row(*_cells(trial))
    return made


def _cells(trial: Trial) -> list[str]:
    errors, client, health = trial.errors, trial.measurement.client, trial.health
    waited, wall = client.get("reader_wait_s"), client.get("wall_s")
    worst = health.errors[0] if health.errors else None
    true = errors.error(worst.name) if worst else None
    return [
        str(trial.concurrency),
        str(errors.events),
        _number(errors.error(TTFT), 1e3, "+.3f"),
        _number(errors.error(ITL), 1e3, "+.4f"),
        _number(errors.error(THROUGHPUT), 100, "+.3f"),
        _number(errors.lag_s.get("p50"), 1e3, ".3f"),
        _number(errors.lag_s.get("p99"), 1e3, ".3f"),
        _number(trial.cpu_us_per_event, 1, ".1f"),
        _number(trial.cpu_share, 100, ".1f"),
        _number(None if waited is None or not wall else waited / wall, 100, ".1f"),
        _number(errors.late_s.get("p99"), 1e3, ".2f"),
        {True: "yes", False: "no", None: "unknown"}[health.ok],
        f"{worst.name} {_error(worst.value, worst)}" if worst else "–",
        "–" if true is None or worst is None else _error(true, worst),
        "yes" if within_limits(trial) else "NO",
    ]


def _error(value: float, worst: Difference) -> str:
    return f"{value:+.3%}" if worst.is_rate else f"{value * 1e3:+.3f} ms"


def _number(value: float | None, scale: float, form: str) -> str:
    return "–" if value is None else format(value * scale, form)


def explanation(trials: Sequence[Trial]) -> list[str]:
    """Return the limits, and a line for what is wrong with a trial beside its numbers."""
    latencies = f"TTFT mean {LIMITS[TTFT] * 1e3:g} ms, ITL mean {LIMITS[ITL] * 1e3:g} ms"
    limits = f"limits: {latencies}, throughput {LIMITS[THROUGHPUT]:.0%}"
    incomplete = [
        f"{trial.concurrency} users: {trial.errors.matched} of {trial.errors.requests} requests came complete"
        for trial in trials
        if trial.errors.matched < trial.errors.requests
    ]
    return [limits, *incomplete, *(_unhealthy(trial) for trial in trials if not trial.health.ok)]


def _unhealthy(trial: Trial) -> str:
    said = "cannot tell whether it is healthy" if trial.health.ok is None else "says that it is not healthy"
    within = "within the limits, but the client " if within_limits(trial) else "the client "
    return f"{trial.concurrency} users: {within}{said}: {trial.health.detail}"


def record(trial: Trial) -> dict[str, Any]:
    """Return every number of a trial, as it lies on disk; seconds, and tokens/s for throughputs."""
    errors, health = trial.errors, trial.health
    own = {error.name: error.value for error in health.errors}
    return {
        "concurrency": trial.concurrency,
        "requests": errors.requests,
        "matched": errors.matched,
        "events": errors.events,
        "statistics": {
            name: {
                "seen": value,
                "true": errors.true.get(name),
                "error": errors.error(name),
                "own_estimate": own.get(name),
            }
            for name, value in errors.seen.items()
        },
        "lag_s": dict(errors.lag_s),
        "server_late_s": dict(errors.late_s),
        "server_cpu_s": trial.server_cpu_s,
        "cpu_us_per_event": trial.cpu_us_per_event,
        "client": trial.measurement.client,
        "client_healthy": health.ok,
        "detail": health.detail,
        "within_limits": within_limits(trial),
    }
