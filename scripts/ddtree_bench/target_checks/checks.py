"""The checks of the targets of a plan, all targets at once: what is in order, worth a note, or in the way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from ddtree_bench.environments.recipes import EnvironmentFailed
from ddtree_bench.external_endpoint import endpoint_now
from ddtree_bench.launchers import target_launcher
from ddtree_bench.project import Project, Report
from ddtree_bench.target_checks import facts as program
from ddtree_bench.target_checks.findings import Finding, refuse_problems
from ddtree_bench.target_checks.gpus import check_gpus, gpus_needed
from ddtree_bench.target_checks.machine import (
    check_clock,
    check_lease,
    check_models,
    check_port,
    check_tools,
    lease_holder,
)
from ddtree_bench.target_checks.planned import PlannedTarget
from ddtree_bench.target_checks.room import check_room
from ddtree_bench.targets import lease
from ddtree_bench.targets.launcher import Launcher, TargetError

PLACEHOLDERS = {
    "to be pinned": "set it to the commit of the files on the target",
    "to be named": "set it to the published name of the model on the target",
}
"""How names and revisions begin in the shipped configurations, which know nobody's files, and what to do about it."""


def check_targets(project: Project, report: Report) -> list[Finding]:
    """Return what was found about every target of the plan, in the plan's order; all are looked at at once."""
    targets = project.plan.targets
    with ThreadPoolExecutor(len(targets)) as pool:
        found = pool.map(lambda name: target_findings(project, name, report), targets)
        return [finding for findings in found for finding in findings]


def check_target(project: Project, name: str, report: Report) -> None:
    """See that nothing keeps a target from being measured; what is worth a note is reported.

    Raises NotReady with all problems of the target.
    """
    findings = target_findings(project, name, report)
    for finding in findings:
        if finding.level == "note":
            report(f"note: {finding}")
    refuse_problems(findings)


def target_findings(project: Project, name: str, report: Report) -> list[Finding]:
    """Return what was found about one target, up to the first matter that makes the others moot."""
    target = PlannedTarget(project, name)
    found = list(_placeholders(target))
    try:
        for finding in _by_launcher(target, report):
            found.append(finding)
    except (TargetError, EnvironmentFailed) as error:
        found.append(target.finding("reachable", "problem", str(error)))
    return found


def _by_launcher(target: PlannedTarget, report: Report) -> Iterator[Finding]:
    if target.spec.launcher == "external":
        yield from _endpoint(target)
    elif target.spec.launcher == "ssh":
        yield from _host(target, report)
    else:
        with closing(target_launcher(target.project, target.name, report)) as launcher:
            yield from _machine(target, launcher)


def _placeholders(target: PlannedTarget) -> Iterator[Finding]:
    """What is measured under a name or revision that says nothing can never be told from what is measured later."""
    for key, value in target.names_and_revisions.items():
        for placeholder, remedy in PLACEHOLDERS.items():
            if value.startswith(placeholder):
                yield target.finding("model", "problem", f"{key}: is {value!r}", remedy)


def _endpoint(target: PlannedTarget) -> Iterator[Finding]:
    known = endpoint_now(target.project, target.servers[0])
    yield target.finding("reachable", "ok", f"{known['url']} answers")
    yield check_lease(target, lease.describe_holder(target.lease) if lease.is_held(target.lease) else None)


def _host(target: PlannedTarget, report: Report) -> Iterator[Finding]:
    """The way to a host and its systemd before the machine itself."""
    # Its libraries take long to load, and most commands reach no host.
    from ddtree_bench.target_checks.host import check_host, host_launcher

    with closing(host_launcher(target, report)) as launcher:
        yield from check_host(target, launcher)
        yield from _machine(target, launcher)


def _machine(target: PlannedTarget, launcher: Launcher) -> Iterator[Finding]:
    """What servers that are started need."""
    root = launcher.expand(target.project.deploy_root(target.name)).rstrip("/")
    receipts = target.receipts(root)
    facts = program.ask(
        launcher,
        port=target.spec.port,
        address=target.spec.host,
        lease=str(target.lease),
        paths=[*receipts.values(), *target.model_paths.values()],
    )
    states, holder = facts.all("path"), lease_holder(facts)
    missing = [engine for engine, state in zip(receipts, states, strict=False) if state != "there"]
    yield check_tools(target, facts)
    yield from check_room(target, launcher, root, missing)
    yield from check_gpus(target.name, facts, gpus_needed(target.spec, target.servers), busy=holder is not None)
    yield from check_port(target, facts)
    yield from check_models(target, states[len(receipts) :])
    yield check_lease(target, holder)
    yield from check_clock(target, facts)
