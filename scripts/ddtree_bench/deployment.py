"""What is deployed on each target: seen to be what the repository has, and removed when nothing needs it any more."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from ddtree_bench.environments import Environment, manifest
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.environments.prune import Removed, prune_environments
from ddtree_bench.environments.recipes import adopted_suffix
from ddtree_bench.launchers import target_launcher
from ddtree_bench.plan import EXTERNAL
from ddtree_bench.project import Project, Report
from ddtree_bench.records.files import read_json, write_json_keeping_time
from ddtree_bench.target_checks import check_target
from ddtree_bench.targets.launcher import Launcher


def build_planned(project: Project, environment: Environment, wheelhouse: Path, report: Report) -> None:
    """Build the wheelhouse of an environment, once every host that it is for can be used.

    It may take minutes, which would be spent in vain. Raises NotReady and EnvironmentFailed.
    """
    if not (wheelhouse / manifest.NAME).exists():
        for target in project.hosts_of(environment.engine, wheelhouse.name):
            check_target(project, target, report)
    build(environment, project.root / "envs", wheelhouse, report=report)


def deploy_planned(project: Project, target: str, engine: str, report: Report) -> dict[str, Any]:
    """Deploy an engine's environment on a target, a host once it can be used; returns the receipt.

    Raises NotReady, EnvironmentFailed and TargetError.
    """
    if project.over_ssh(target):
        check_target(project, target, report)
    with closing(target_launcher(project, target, report)) as launcher:
        return _deployed(project, launcher, target, engine, report)


def confirm_deployment(
    project: Project, launcher: Launcher, target: str, engine: str, report: Report
) -> dict[str, Any]:
    """See that the environment on a target is the one of the repository, and make it so if not; returns the receipt.

    The receipt in the results folder becomes that one, if there is any, and keeps its time: what follows from a change
    shows in the host's record. Of an external endpoint there is nothing to see. Raises EnvironmentFailed.
    """
    if project.config.targets[target].launcher == "external":
        return external_receipt(engine)
    wheelhouse = project.manifest(target, engine).parent
    build(project.environment(target, engine), project.root / "envs", wheelhouse, report=report)
    receipt, path = _deployed(project, launcher, target, engine, report), project.receipt(target, engine)
    if path.exists() and read_json(path) != receipt:
        write_json_keeping_time(path, receipt)
    return receipt


def _deployed(project: Project, launcher: Launcher, target: str, engine: str, report: Report) -> dict[str, Any]:
    root, wheelhouse = launcher.expand(project.deploy_root(target)), project.manifest(target, engine).parent
    return deploy(launcher, wheelhouse, root, adopt=project.adopted(target, engine), report=report)


def external_receipt(engine: str) -> dict[str, Any]:
    """Return what stands for the receipt of a deployment where nothing is built or deployed."""
    return {"engine": engine, "key": EXTERNAL, "folder": None, "python": None, "versions": {}}


def prune_target(project: Project, target: str, report: Report) -> list[Removed]:
    """Remove from a host what neither its plan nor `keep_environments` keeps. Raises TargetError and EnvironmentFailed.

    Nothing of other targets: clones share what is installed on this machine, and their plans are not known here.
    """
    spec = project.config.targets[target]
    if not project.over_ssh(target):
        return []
    engines = [engine for place, engine in project.environment_keys if place == target]
    keep = [
        project.environment_name(target, engine) + adopted_suffix(project.adopted(target, engine)) for engine in engines
    ]
    with closing(target_launcher(project, target, report)) as launcher:
        root = launcher.expand(project.deploy_root(target))
        return prune_environments(launcher, root, keep, spec.keep_environments, report)
