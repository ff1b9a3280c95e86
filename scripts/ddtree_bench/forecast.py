"""What a plan takes and can show: a table of servers and cells, time from earlier runs, detectable effects."""

from __future__ import annotations

import math
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
from ddtree_bench.plan import Cell, Server
from ddtree_bench.project import Project
from ddtree_bench.record_status import status_of
from ddtree_bench.records.store import Store
from ddtree_bench.status import CellStatus, cell_statuses

TABLE_WIDTH = 160

STATES = ("cached", "aborted", "failed")
"""What the store may have of a cell, a column each."""

ASSUMED_RUN_SD = 0.03
"""Relative standard deviation between runs that the detectable effects are given for."""


Kind = tuple[str, str, str]
"""Target, model's name and method: what servers are taken to be alike by."""

IN_FLIGHT_S = 1.0
"""A request is taken to last at least as long, so an open loop with fewer than rate x this in flight is bounded."""


@dataclass(frozen=True)
class History:
    """Seconds of earlier starts by kind, and of closed loops per request by kind and concurrency."""

    start_s: dict[Kind, float]
    request_s: dict[Kind, dict[int, float]]

    def seconds(self, missing: Sequence[CellStatus]) -> float | None:
        """Return the time for missing cells, each server started once a repeat; None without a precedent."""
        starts = {(status.cell.server, status.cell.repeat) for status in missing}
        parts = [self.start_s.get(_kind(server)) for server, _ in starts]
        parts += [self._cell_seconds(status.cell) for status in missing]
        known = [seconds for seconds in parts if seconds is not None]
        return sum(known) if len(known) == len(parts) else None

    def _cell_seconds(self, cell: Cell) -> float | None:
        """An open loop lasts as long as requests arrive; a closed one as at the nearest concurrency that was measured.

        Nearest by ratio; of two equally near the smaller, which is the slower.
        """
        if cell.load.rate is not None:
            return cell.workload.n_prompts / cell.load.rate
        measured = self.request_s.get(_kind(cell.server))
        if not measured:
            return None
        nearest = min(sorted(measured), key=lambda c: abs(math.log(c / cell.load.concurrency)))
        return measured[nearest] * cell.workload.n_prompts


def _kind(server: Server) -> Kind:
    return server.target, server.model.name, server.method


def history(store: Store) -> History:
    """Average what the store's records say about starts and cells that were measured to their end."""
    starts: dict[Kind, dict[str, float]] = defaultdict(dict)
    requests: dict[Kind, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in (attempt.record for attempt in store.readable()):
        if status_of(record) != "ok":
            continue
        server = record["identity"]["server"]
        kind = (server["target"], server["model"]["name"], server["method"])
        # An external endpoint was ready before.
        starts[kind][record["start_id"]] = (record["ready_s"] or 0.0) + record["warmup"].get("seconds", 0.0)
        load = record["identity"]["load"]
        if load.get("rate") is None:
            duration = datetime.fromisoformat(record["ended_at"]) - datetime.fromisoformat(record["started_at"])
            seconds = duration.total_seconds() / record["identity"]["workload"]["n_prompts"]
            requests[kind][load["concurrency"]].append(seconds)
    return History(
        {kind: fmean(values.values()) for kind, values in starts.items()},
        {kind: {c: fmean(values) for c, values in found.items()} for kind, found in requests.items()},
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
        known = None if seconds is None else f"about {seconds / 60:.1f} min, from earlier runs"
        lines.append(f"time: {known or _unknown(project, missing)}")
    lines.append(_power(project))
    lines += _unplanned_comparisons(project) + _bounded_open_loops(project)
    return "\n".join(lines)


def _unknown(project: Project, missing: Sequence[CellStatus]) -> str:
    """What bounds the time where there is no precedent: the limits that starts and cells have, crashes aside."""
    targets, workloads = project.config.targets, project.config.workloads
    servers = [server for server, _ in {(status.cell.server, status.cell.repeat) for status in missing}]
    starts_h = sum(targets[server.target].start_timeout_s for server in servers) / 3600
    cells_h = sum(workloads[status.cell.workload.name].cell_timeout_s for status in missing) / 3600
    return (
        f"unknown: no earlier run; one after another {len(servers)} starts take at most {starts_h:.1f} h "
        f"(start_timeout_s), and {len(missing)} cells at most {cells_h:.0f} h (cell_timeout_s)"
    )


def _server_table(project: Project, statuses: Sequence[CellStatus]) -> str:
    table = Table()
    for head in ("target", "server", "verify width", "workloads", "loads", "repeats", "cells", *STATES):
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
            *(str(sum(s.state == state for s in own)) for state in STATES),
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


def _bounded_open_loops(project: Project) -> list[str]:
    """Name the open loops that so few requests in flight hold back, so that they are hardly open."""
    loads = dict.fromkeys(cell.load for cell in project.plan.cells if cell.load.rate is not None)
    return [
        f"warning: {load.name}: with at most {load.concurrency} in flight, {load.rate:g} requests/s are held back as "
        f"soon as one takes longer than {load.concurrency / load.rate:.2g} s; raise the concurrency beside this rate, "
        "or leave it out"
        for load in loads
        if load.rate is not None and load.concurrency < load.rate * IN_FLIGHT_S
    ]


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
