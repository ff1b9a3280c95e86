"""The machine of the load client: what measures or computes on it does so alone, whatever the target.

A lease on a target keeps runs on that target apart. Runs on several targets still share the client's machine, and there
they would take each other's CPU time. So within one workflow a resource lets one job through at a time, and a lease of
its own does so between clones and users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddtree_bench.project import Project
from ddtree_bench.targets import lease

RESOURCE = "client_machine"
"""Snakemake's resource of every job that measures or trains; the workflow sets its limit to 1."""

LEASE = "client"


@contextmanager
def client_lease(project: Project, target: str, run: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease on this machine for a run on a target, whose `lease_dir` and `lease_wait_s` apply.

    Take it after the target's own: whoever holds it measures, and waits for nobody. Raises TargetBusy with the owner's
    name when it is still held after `lease_wait_s`.
    """
    spec = project.config.targets[target]
    with lease.acquire(LEASE, _directory(project, target), run=run, wait_s=spec.lease_wait_s, report=report):
        yield


@contextmanager
def training_lease(project: Project, run: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease on this machine in every folder in which a planned target has it.

    Waits as long as the most patient of them; raises TargetBusy as `client_lease`.
    """
    wait_s = max(project.config.targets[target].lease_wait_s for target in project.plan.targets)
    with ExitStack() as held:
        for directory in sorted({_directory(project, target) for target in project.plan.targets}):
            held.enter_context(lease.acquire(LEASE, directory, run=run, wait_s=wait_s, report=report))
        yield


def _directory(project: Project, target: str) -> Path:
    given = project.config.targets[target].lease_dir
    return Path(given) if given else lease.DEFAULT_DIRECTORY
