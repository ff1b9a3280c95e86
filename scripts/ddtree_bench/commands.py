"""The commands that look at a project or tidy it up; each returns what it has to say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from ddtree_bench import status
from ddtree_bench.deployment import prune_target
from ddtree_bench.explain import explain
from ddtree_bench.forecast import forecast
from ddtree_bench.hosts import record_host
from ddtree_bench.launchers import target_launcher
from ddtree_bench.partial import partial
from ddtree_bench.project import Project, Report
from ddtree_bench.records.store import Store, StoreError
from ddtree_bench.target_checks import check_targets, findings_table, refuse_problems


def _plan(project: Project, _report: Report) -> str:
    return forecast(project)


def _explain(project: Project, _report: Report) -> str:
    return explain(project)


def _partial(project: Project, report: Report) -> str:
    return partial(project, report)


def _probe(project: Project, report: Report) -> str:
    for target in project.plan.targets:
        record_host(project, target, report, accept=True)
    return "\n".join(f"recorded: {project.host_record(target)}" for target in project.plan.targets)


def _check_targets(project: Project, report: Report) -> str:
    findings = check_targets(project, report)
    report(findings_table(findings))
    refuse_problems(findings)
    return f"{len(project.plan.targets)} targets are ready"


def _verify(project: Project, _report: Report) -> str:
    store = Store(project.folders.store)
    problems = list(store.problems())
    if problems:
        raise StoreError("\n".join(problems))
    return f"{sum(1 for _ in store.entries())} attempts in {store.root} agree with their digests"


def _prune(project: Project, report: Report) -> str:
    views = status.prune(project)
    places = {target: prune_target(project, target, report) for target in project.plan.targets}
    on_hosts = [f"removed {target}: {removed}" for target, found in places.items() for removed in found]
    done = f"removed: {len(views)} views, {len(on_hosts)} files and folders on hosts; the store is untouched"
    return "\n".join([*(f"removed {path}" for path in views), *on_hosts, done])


def _stop_all(project: Project, report: Report) -> str:
    stopped = []
    for target in project.plan.targets:
        with closing(target_launcher(project, target, report)) as launcher:
            stopped += [f"{target}: {what}" for what in launcher.stop_all()]
    return "\n".join([*stopped, f"{len(stopped)} servers stopped"])


COMMANDS: dict[str, tuple[str, Callable[[Project, Report], str]]] = {
    "plan": ("print servers, cells, the time they will take and what they can show", _plan),
    "explain": ("print for every cell whether it is cached and, if not, what is new about it", _explain),
    "partial": ("make tables, figures and report from what the store holds now", _partial),
    "probe": ("record anew what the targets are", _probe),
    "check_targets": ("say in seconds what every target lacks, and what to do about it", _check_targets),
    "verify": ("check the store against its digests", _verify),
    "prune": ("remove views that no cell of the plan stands for, and old environments from hosts", _prune),
    "stop_all": ("stop every server that this workflow left on its targets", _stop_all),
}
"""Name: what it does, and the function that does it."""


def run_command(name: str, project: Project, report: Report) -> str:
    """Run a command by name and return what it has to say. Raises the user errors of what it does."""
    return COMMANDS[name][1](project, report)
