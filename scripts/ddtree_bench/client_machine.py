"""The machine of the load client: who may measure or compute on it at the same time, whatever the target.

A lease on a target keeps runs on that target apart. Runs on several targets still share the client's machine. Where
the server runs elsewhere there is CPU time for several clients, so such runs share it. A server on this machine, an
endpoint of which nobody knows where it is, and a training have it alone. A client on the target takes nothing of it.
So within one workflow a resource, and between clones and users a lease of its own, let through what goes together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddtree_bench.config.models import Target
from ddtree_bench.project import Project
from ddtree_bench.targets import lease

RESOURCE = "client_machine"
"""Snakemake's resource of every job that measures or trains; the workflow sets its limit to LIMIT."""

LIMIT = max(2, os.cpu_count() or 1)
"""Units of the resource: as many clients as may share this machine, one a CPU. What needs it alone takes them all."""

LEASE = "client"


def client_units(target: Target) -> int:
    """How many units of the resource a run on a target takes: LIMIT when it needs this machine alone, 1 or 0."""
    if target.launcher != "ssh":
        return LIMIT
    return 1 if target.client == "here" else 0


@contextmanager
def client_lease(project: Project, target: str, run: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease on this machine for a run on a target, whose `lease_wait_s` applies.

    It lies in the target's `lease_dir` where the target is this machine.

    It is shared with other runs whose clients alone are here, and not taken for one whose client is on the target.
    Take it after the target's own: whoever holds it measures, and waits for nobody. Raises TargetBusy with the owner's
    name when it is still held after `lease_wait_s`.
    """
    spec = project.config.targets[target]
    units, directory = client_units(spec), _directory(project, target)
    if units == 0:
        yield
        return
    shared = units < LIMIT
    with lease.acquire(LEASE, directory, run=run, wait_s=spec.lease_wait_s, report=report, shared=shared):
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
    spec = project.config.targets[target]
    # That of a host is a folder there.
    return Path(spec.lease_dir) if spec.lease_dir and spec.launcher != "ssh" else lease.DEFAULT_DIRECTORY
