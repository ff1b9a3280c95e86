"""What a plan takes and can show: a table of servers and cells, time from earlier runs, detectable effects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from ddtree_bench import stats
from ddtree_bench.comparisons import Named
from ddtree_bench.outputs import named_comparisons
from ddtree_bench.plan import Server
from ddtree_bench.project import Project
from ddtree_bench.records.store import Store
from ddtree_bench.status import CellStatus, cell_statuses

TABLE_WIDTH = 160

ASSUMED_RUN_SD = 0.03
"""Relative standard deviation between runs that the detectable effects are given for."""


@dataclass(frozen=True)
class History:
    """Seconds of earlier starts and of earlier cells per request, by target and method."""

    start_s: dict[tuple[str, str], float]
    request_s: dict[tuple[str, str], float]

    def seconds(self, missing: Sequence[CellStatus]) -> float | None:
        """Return the time for missing cells, each server started once a repeat; None without a precedent."""
        starts = {(status.cell.server, status.cell.repeat) for status in missing}
        if any(_kind(server) not in self.start_s for server, _ in starts):
            return None
        starting = sum(self.start_s[_kind(server)] for server, _ in starts)
        measuring = sum(self.request_s[_kind(s.cell.server)] * s.cell.workload.n_prompts for s in missing)
        return starting + measuring


def _kind(server: Server) -> tuple[str, str]:
    return server.target, server.method


def history(store: Store) -> History:
    """Average what the store's records say about starts and cells."""
    starts: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    requests: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in (attempt.record for attempt in store.readable()):
        if record["status"] != "ok":
            continue
        server = record["identity"]["server"]
        kind = (server["target"], server["method"])
        starts[kind][record["start_id"]] = record["ready_s"] + record["warmup"]["seconds"]
        duration = datetime.fromisoformat(record["ended_at"]) - datetime.fromisoformat(record["started_at"])
        requests[kind].append(duration.total_seconds() / record["identity"]["workload"]["n_prompts"])
    return History(
        {kind: fmean(values.values()) for kind, values in starts.items()},
        {kind: fmean(values) for kind, values in requests.items()},
    )


def forecast(project: Project) -> str:
    """Return the plan in words: servers and their cells, what is missing, its time, the least detectable effect."""
    statuses = cell_statuses(project)
    missing = [status for status in statuses if status.attempt is None]
    seconds = history(Store(project.folders.store)).seconds(missing)
    starts = {(status.cell.server.key, status.cell.repeat) for status in missing}
    lines = [
        _server_table(project, statuses),
        f"{len(statuses)} cells in {len(project.plan.runs)} runs: "
        f"{len(missing)} cells to be measured in {len(starts)} starts",
    ]
    if missing:
        known = f"about {seconds / 60:.1f} min, from earlier runs" if seconds is not None else "unknown: no earlier run"
        lines.append(f"time: {known}")
    lines.append(_power(project))
    lines += _unplanned_comparisons(project)
    return "\n".join(lines)


def _server_table(project: Project, statuses: Sequence[CellStatus]) -> str:
    table = Table()
    for head in ("target", "server", "verify width", "workloads", "loads", "repeats", "cells", "cached", "failed"):
        table.add_column(head, no_wrap=head in ("target", "server"))
    for server in project.plan.servers:
        own = [status for status in statuses if status.cell.server == server]
        table.add_row(
            server.target,
            server.name,
            str(server.verify_width),
            ", ".join(dict.fromkeys(s.cell.workload.name for s in own)),
            ", ".join(dict.fromkeys(s.cell.load.name for s in own)),
            str(project.config.repeats),
            str(len(own)),
            str(sum(s.state == "cached" for s in own)),
            str(sum(s.state == "failed" for s in own)),
        )
    text = StringIO()
    Console(file=text, width=TABLE_WIDTH).print(table)
    return text.getvalue().rstrip()


def _unplanned_comparisons(project: Project) -> list[str]:
    """Name the comparisons of which nothing can come, since one of their sides is not in the sweep."""
    methods = {server.method for server in project.plan.servers}
    lines = []
    for index, comparison in enumerate(named_comparisons(project.config)):
        if not _tests(project, [comparison]) or comparison.baseline not in methods:
            parts = {
                name: getattr(comparison, name) for name in ("method", "budget", "topk_cap", "concurrency", "rate")
            }
            named = " ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
            lines.append(f"warning: comparisons[{index}]: {named} against {comparison.baseline} is not in the sweep")
    return lines


def _tests(project: Project, named: Sequence[Named]) -> int:
    """Count the rows of the speed-up table that the comparisons cover: a test each, of one Holm correction."""
    covered = set()
    for cell in project.plan.cells:
        server, load = cell.server, cell.load
        row: dict[str, Any] = {"method": server.method, "budget": server.budget, "topk_cap": server.topk_cap}
        row |= {"load_kind": load.kind, "concurrency": load.concurrency, "rate": load.rate}
        covered |= {
            (cell.server, cell.workload, cell.load, comparison.baseline)
            for comparison in named
            if comparison.covers(row, comparison.baseline)
        }
    return len(covered)


def _power(project: Project) -> str:
    repeats = project.config.repeats
    if repeats < 2:
        return "1 repeat: no interval can be given; 3 give one, a claim needs 5"
    named = _tests(project, named_comparisons(project.config))
    exploratory = {(c.server, c.workload, c.load) for c in project.plan.cells if c.server.method != "AR"}
    comparisons = max(1, named or len(exploratory))
    one = stats.least_detectable_effect(ASSUMED_RUN_SD, repeats)
    every = stats.least_detectable_effect(ASSUMED_RUN_SD, repeats, comparisons)
    return (
        f"least detectable speed-up with {repeats} repeats, at {ASSUMED_RUN_SD:.0%} between runs and 80 % power: "
        f"{one:.1%} for one comparison, {every:.1%} for the first of {comparisons} (Holm)"
    )
