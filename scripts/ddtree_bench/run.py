"""A run: under its leases, the cells that the store lacks on a server started afresh; then the views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_bench.client_machine import client_lease
from ddtree_bench.hosts import (
    confirm_deployment,
    confirm_host,
    knows_models,
    read_host,
    server_host_key,
    target_launcher,
)
from ddtree_bench.plan import Cell, Run
from ddtree_bench.project import Project, Report
from ddtree_bench.record_status import to_retry
from ddtree_bench.records.store import Attempt, Store
from ddtree_bench.records.views import write_run_views
from ddtree_bench.run_start import RunStart
from ddtree_bench.targets.lifeline import Interruption, tied_to_ancestors


def measure_run(project: Project, run: Run, report: Report) -> None:
    """Measure the cells of a run that the store lacks and write the views of all of them.

    A cell that cannot be measured is stored as failed, with its reason. Raises TargetError when the target, and not the
    server under test, is at fault, and Interrupted when the process was told to end; the server is stopped in any case.
    """
    store = Store(project.folders.store)
    host = read_host(project, run.server.target)
    attempts = _attempts(project, run, store, host)
    if len(attempts) < len(run.cells):
        with Interruption() as interruption, tied_to_ancestors():
            attempts = _measure_missing(project, run, store, interruption, report)
    else:
        report(f"all {len(run.cells)} cells are in the store")
    write_run_views(run, attempts, store, project.folders.results)


def _attempts(
    project: Project, run: Run, store: Store, host: Mapping[str, Any], retry: bool | None = None
) -> dict[Cell, Attempt]:
    """Return what the store has of a run's cells on a host.

    Attempts that `retry_failed` is for (record_status.to_retry) do not count while they are retried.
    """
    if not knows_models(host, run.server):
        return {}
    key = server_host_key(host, run.server)
    retried = project.config.retry_failed if retry is None else retry
    found = {cell: attempt for cell in run.cells if (attempt := store.latest(cell.key, key))}
    return {cell: attempt for cell, attempt in found.items() if not (retried and to_retry(attempt.record))}


def _measure_missing(
    project: Project, run: Run, store: Store, interruption: Interruption, report: Report
) -> dict[Cell, Attempt]:
    target = run.server.target
    launcher = target_launcher(project, target)
    with (
        launcher.acquire(run.name, project.config.targets[target].lease_wait_s, report),
        client_lease(project, target, run.name, report),
    ):
        store.check_writable()
        receipt = confirm_deployment(project, launcher, target, run.server.engine, report)
        host = confirm_host(project, launcher, run.server, receipt)
        # Somebody else may have measured these cells into a shared store while this run waited for the target.
        present = _attempts(project, run, store, host)
        pending = [cell for cell in run.cells if cell not in present]
        starts_left = project.config.max_restarts + 1
        while pending:
            starts_left -= 1
            report(f"{run.server.name}, repeat {run.repeat}: {len(pending)} cells to measure")
            start = RunStart(project, run, store, launcher, host, receipt, report)
            pending = start.measure(pending, interruption, starts_left)
    return _attempts(project, run, store, host, retry=False)
