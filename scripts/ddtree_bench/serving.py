"""One server of a configuration in the foreground: what `python -m ddtree_bench serve` does."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.hosts import target_launcher
from ddtree_bench.project import Project, open_project
from ddtree_bench.servers.serve import serve
from ddtree_bench.session import server_place

Report = Callable[[str], None]

CHOICES = ("target", "model", "method", "budget", "topk_cap", "block_size")
"""What of a sweep block the command line may choose."""


def open_serving(tree: Mapping[str, Any], root: Path, chosen: Mapping[str, Any]) -> Project:
    """Open a configuration whose sweep is narrowed to one server: the first block's first values where none is chosen.

    Raises ConfigError as for any configuration.
    """
    first = tree["sweep"][0]
    narrowed = {key: value[:1] if isinstance(value, list) else value for key, value in first.items()}
    narrowed |= {key: chosen[key] for key in CHOICES if chosen.get(key) is not None}
    for key in ("include", "exclude"):
        narrowed.pop(key, None)
    changes = {"sweep": [narrowed], "repeats": 1, "allow_missing_baseline": True, "comparisons": []}
    return open_project({**tree, **changes}, root, root / "results")


def serve_project(project: Project, port: int, report: Report) -> None:
    """Serve the one server of a project until a signal ends it; prints its base URL when it is ready.

    The environment is built and deployed first where it is not there yet. Raises ServerFailed and TargetError.
    """
    (server,) = project.plan.servers
    target = project.config.targets[server.target]
    launcher = target_launcher(project, server.target)
    wheelhouse = project.manifest(server.engine).parent
    build(server.engine, project.root / "envs", wheelhouse, report=report)
    receipt = deploy(launcher, wheelhouse, project.deploy_root(server.target), report=report)
    start_id = uuid.uuid4().hex[:12]
    place = server_place(project, launcher, server, receipt["python"], start_id, port)
    log_path = project.places.results / "logs" / "servers" / server.target / f"{server.name}-serve-{start_id}.log"
    serve(
        launcher,
        server,
        place,
        log_path=log_path.absolute(),
        lease_wait_s=target.lease_wait_s,
        stop_grace_s=target.stop_grace_s,
        timeout_s=target.start_timeout_s,
        report=report,
    )
