"""The server of an external target: where it is reached, and what it says of itself now."""

from __future__ import annotations

import os
from typing import Any

from ddtree_bench.plan import Server
from ddtree_bench.project import Project
from ddtree_bench.servers import endpoint
from ddtree_bench.servers.endpoint import Endpoint
from ddtree_bench.targets.external import plain_url
from ddtree_bench.targets.launcher import TargetError


def external_endpoint(project: Project, server: Server) -> Endpoint:
    """Return where an external server is reached and as what. Raises TargetError when its key is not at hand."""
    spec = project.config.targets[server.target]
    headers = {}
    if spec.api_key_env is not None:
        if not os.environ.get(spec.api_key_env):
            raise TargetError(
                f"targets.{server.target}.api_key_env: the variable {spec.api_key_env} is not set; "
                "set it to the key of the endpoint, or take api_key_env out"
            )
        headers["Authorization"] = f"Bearer {os.environ[spec.api_key_env]}"
    return Endpoint(plain_url(spec.url or ""), spec.served_model or server.model.name, headers)


def endpoint_now(project: Project, server: Server) -> dict[str, Any]:
    """Return what is known of an external endpoint now, and what this project does to it. Raises TargetError."""
    known = endpoint.record(external_endpoint(project, server), server.target)
    return {**known, "flush_cache": project.config.targets[server.target].flush_cache}
