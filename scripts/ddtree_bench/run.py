"""A run: under its leases, the cells that the store lacks on a server started afresh; then the views."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from ddtree_bench.client_machine import client_lease
from ddtree_bench.client_on_target import ClientPlace
from ddtree_bench.collect import collect
from ddtree_bench.deployment import confirm_deployment
from ddtree_bench.environments.recipes import CLIENT
from ddtree_bench.hosts import confirm_host, knows_models, read_host, server_host_key
from ddtree_bench.launchers import target_launcher
from ddtree_bench.plan import Cell, Run
from ddtree_bench.project import Project, Report
from ddtree_bench.record_status import to_retry
from ddtree_bench.records.store import Attempt, Store
from ddtree_bench.records.views import write_run_views
from ddtree_bench.run_start import Confirmed, RunStart
from ddtree_bench.server_start import secret_values
from ddtree_bench.spool import Spool
from ddtree_bench.targets.launcher import Launcher, TargetLost
from ddtree_bench.targets.lease import Owner
from ddtree_bench.targets.lifeline import Interruption, tied_to_ancestors

TRIES = 3
"""How often a run is begun whose host, or the way to it, is lost: it may have been started again."""


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
            attempts = _measure_until_done(project, run, store, interruption, report)
    else:
        report(f"all {len(run.cells)} cells are in the store")
    write_run_views(run, attempts, store, project.folders.results)


def _measure_until_done(
    project: Project, run: Run, store: Store, interruption: Interruption, report: Report
) -> dict[Cell, Attempt]:
    """Measure what the store lacks, again when the target is lost meanwhile and comes back, TRIES times in all."""
    tries_left = TRIES if project.over_ssh(run.server.target) else 1
    while True:
        tries_left -= 1
        try:
            return _measure_missing(project, run, store, interruption, report)
        except TargetLost as lost:
            if tries_left == 0:
                raise
            report(f"{run.name}: {lost}; beginning again")
        with closing(target_launcher(project, run.server.target, report)) as launcher:
            launcher.reach(report)


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
    with (
        closing(target_launcher(project, target, report)) as launcher,
        launcher.acquire(run.name, project.config.targets[target].lease_wait_s, report),
        client_lease(project, target, run.name, report),
    ):
        store.check_writable()
        spool = _spool(project, launcher, run)
        if spool is not None:
            collect(spool, run.cells, store, secret_values(project, target), report)
        confirmed = _confirmed(project, launcher, run, spool, report)
        # Somebody else may have measured these cells into a shared store while this run waited for the target.
        present = _attempts(project, run, store, confirmed.host)
        pending = [cell for cell in run.cells if cell not in present]
        starts_left = project.config.max_restarts + 1
        while pending:
            starts_left -= 1
            report(f"{run.server.name}, repeat {run.repeat}: {len(pending)} cells to measure")
            start = RunStart(project, run, store, launcher, confirmed, report)
            pending = start.measure(pending, interruption, starts_left)
    return _attempts(project, run, store, confirmed.host, retry=False)


def _spool(project: Project, launcher: Launcher, run: Run) -> Spool | None:
    """The spool of load clients on the target; None where they run on this machine."""
    if run.server.client != "target":
        return None
    return Spool(launcher, project.deploy_root(run.server.target), Owner.this_process(run.name))


def _confirmed(project: Project, launcher: Launcher, run: Run, spool: Spool | None, report: Report) -> Confirmed:
    """See that what the run needs on the target is there, and that the target is the one that was recorded."""
    server = run.server
    receipt = confirm_deployment(project, launcher, server.target, server.engine, report)
    client = None
    if spool is not None:
        client = ClientPlace(confirm_deployment(project, launcher, server.target, CLIENT, report)["python"], spool)
    return Confirmed(confirm_host(project, launcher, server, receipt), receipt, client)
