"""One server of a configuration in the foreground: what `python -m ddtree_bench serve` does."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddtree_bench.config import ConfigError
from ddtree_bench.deployment import confirm_deployment
from ddtree_bench.launchers import target_launcher
from ddtree_bench.micro_training import train_for
from ddtree_bench.plan import Server
from ddtree_bench.project import Project, Report, open_project
from ddtree_bench.server_start import passed_environment, server_place
from ddtree_bench.servers.serve import serve
from ddtree_bench.targets.launcher import Launcher
from ddtree_bench.targets.lifeline import Interrupted, Interruption

CHOICES = ("target", "model", "method", "budget", "topk_cap", "block_size")
"""What of a server the command line may choose."""


def choose_server(tree: Mapping[str, Any], root: Path, chosen: Mapping[str, Any]) -> tuple[Project, Server]:
    """Return the planned server that the choices leave, or the one that the first sweep block would give for them.

    Raises ConfigError as for any configuration, and with the servers' names when several are left.
    """
    wanted = {key: chosen[key] for key in CHOICES if chosen.get(key) is not None}
    project = open_project(tree, root, root / "results")
    planned = [server for server in project.plan.servers if _is_wanted(project, server, wanted)]
    if len(planned) > 1:
        names = ", ".join(server.name for server in planned)
        raise ConfigError(
            [f"serve: several servers are meant: {names}; choose one by budget, cap, block, model or target"]
        )
    if planned:
        return project, planned[0]
    first = {**tree["sweep"][0], **wanted, "include": [], "exclude": []}
    narrowed = {key: value[:1] if isinstance(value, list) else value for key, value in first.items()}
    changes = {"sweep": [narrowed], "repeats": 1, "allow_missing_baseline": True, "comparisons": []}
    project = open_project({**tree, **changes}, root, root / "results")
    return project, project.plan.servers[0]


def _is_wanted(project: Project, server: Server, wanted: Mapping[str, Any]) -> bool:
    values = {**asdict(server), "model": project.model_name(server)}
    return all(values[key] == value for key, value in wanted.items())


def serve_project(project: Project, server: Server, port: int, report: Report) -> None:
    """Serve one server of a project until a signal ends it; prints its base URL when it is ready.

    The environment is built and deployed first where it is not there yet, and a micro model trained. Raises
    ServerFailed and TargetError.
    """
    with closing(target_launcher(project, server.target, report)) as launcher:
        _serve_on(launcher, project, server, port, report)


def _serve_on(launcher: Launcher, project: Project, server: Server, port: int, report: Report) -> None:
    target = project.config.targets[server.target]
    receipt = confirm_deployment(project, launcher, server.target, server.engine, report)
    try:
        with Interruption():
            train_for(project, server, launcher, receipt["python"], report)
    except Interrupted as interrupted:
        report(f"{server.name}: not started, {interrupted}")
        return
    start_id = uuid.uuid4().hex[:12]
    place = server_place(project, launcher, server, receipt["python"], start_id, port)
    log_path = project.folders.results / "logs" / "servers" / server.target / f"{server.name}-serve-{start_id}.log"
    serve(
        launcher,
        server,
        place,
        log_path=log_path.absolute(),
        lease_wait_s=target.lease_wait_s,
        stop_grace_s=target.stop_grace_s,
        timeout_s=target.start_timeout_s,
        report=report,
        private_env=passed_environment(target),
    )
