"""What of a plan is there: the state of each cell, summaries, and the removal of views nobody asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddtree_bench.hosts import knows_models, read_host, server_host_key
from ddtree_bench.plan import Cell, Run
from ddtree_bench.project import Project
from ddtree_bench.record_status import reason_of, status_of, timed_out, to_retry
from ddtree_bench.records.store import Attempt, Store
from ddtree_bench.records.views import read_view

State = Literal["cached", "aborted", "failed", "missing"]


@dataclass(frozen=True)
class CellStatus:
    """A cell and the latest attempt at it on the target as it was probed last, if there is one."""

    cell: Cell
    attempt: Attempt | None

    @property
    def state(self) -> State:
        """cached, aborted or failed (kept as results), or missing."""
        if self.attempt is None:
            return "missing"
        status = status_of(self.attempt.record)
        return "cached" if status == "ok" else status


def host_keys(project: Project) -> dict[str, str]:
    """Return the host key of every server whose target has been probed with its models, by the server's key."""
    records = {t: read_host(project, t) for t in project.plan.targets if project.host_record(t).exists()}
    return {
        server.key: server_host_key(records[server.target], server)
        for server in project.plan.servers
        if server.target in records and knows_models(records[server.target], server)
    }


def cell_statuses(project: Project) -> list[CellStatus]:
    """Return the state of every cell of the plan; all are missing on a target that was never probed."""
    store, hosts = Store(project.folders.store), host_keys(project)
    return [
        CellStatus(cell, store.latest(cell.key, hosts[cell.server.key]) if cell.server.key in hosts else None)
        for cell in project.plan.cells
    ]


def summary(project: Project) -> str:
    """Return the closing lines of a workflow: how many cells are there, which failed and why, where the report is."""
    counts: Counter[str] = Counter()
    warnings = []
    for cell in project.plan.cells:
        path = project.folders.results / cell.view
        if not path.exists():
            counts["absent"] += 1
            continue
        view = read_view(path)
        counts[status_of(view)] += 1
        if to_retry(view):
            warnings.append(f"warning: {_trouble(view)} {path}{_why(view)}")
    numbers = ", ".join(f"{counts[state]} {state}" for state in ("ok", "aborted", "failed", "absent") if counts[state])
    lines = [f"cells: {numbers or 'none'}"]
    lines += warnings
    if warnings:
        lines.append("They are kept as results; measure them again with: snakemake --config retry_failed=true")
    report = project.folders.results / "report.html"
    if report.exists():
        lines.append(f"report: {report}")
    return "\n".join(lines)


def _trouble(view: Mapping[str, Any]) -> str:
    words = {"failed": "failed cell", "aborted": "cell broken off"}
    return words.get(status_of(view)) or f"{timed_out(view)} requests timed out in cell"


def _why(view: Mapping[str, Any]) -> str:
    reason = reason_of(view)
    return f": {reason}" if reason else ""


def runs_with_failures(project: Project) -> frozenset[Run]:
    """Return the runs of which a view says that `retry_failed` is for it (record_status.to_retry)."""
    return frozenset(
        run
        for run in project.plan.runs
        for path in map(Path, project.views(run))
        if path.exists() and to_retry(read_view(path))
    )


def prune(project: Project) -> list[Path]:
    """Remove views that no cell of the plan stands for; the store is not touched. Returns what was removed."""
    wanted = {project.folders.results / cell.view for cell in project.plan.cells}
    wanted |= {project.folders.results / run.warmup_view for run in project.plan.runs}
    removed = [path for path in sorted((project.folders.results / "cells").glob("*/*/*.json")) if path not in wanted]
    for path in removed:
        path.unlink()
    return removed
