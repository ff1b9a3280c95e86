"""How a run comes by its server: it starts one, or sees that the external endpoint is the one that was planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddtree_bench import keys
from ddtree_bench.config.checks import SECRET_KEY
from ddtree_bench.config.models import Target
from ddtree_bench.external_endpoint import external_endpoint
from ddtree_bench.load.bodies import PATHS, request_body
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Server, Workload
from ddtree_bench.project import Project
from ddtree_bench.servers.command_line import Place, served_model_name
from ddtree_bench.servers.endpoint import Endpoint, see_answer
from ddtree_bench.servers.own_words import kept
from ddtree_bench.servers.start import start_server
from ddtree_bench.targets.external import endpoint_of
from ddtree_bench.targets.launcher import Launcher

FIRST_PROMPT = Prompt("first", 1, "first", "The sky is")
FIRST_TOKENS = 4


@dataclass(frozen=True)
class Start:
    """One start of a server: its name, where it is reached once it is ready, and what it said and cost until then.

    `server_info` is what may be recorded of what it said. An external endpoint's start is that of its server, not of
    the run: `start_id` stays the same as long as it runs on, what it cost is not known, and `started` is what it tells
    of it. `read_back` says which parts of its launch configuration its own words confirm; of a server that was started
    here all must agree.
    """

    start_id: str
    log_path: Path
    endpoint: Endpoint = field(default_factory=lambda: Endpoint("", "", {}))
    ready_s: float | None = None
    server_info: Mapping[str, Any] | None = None
    started: str | None = None
    read_back: Mapping[str, Any] | None = None
    warmup: Mapping[str, Any] | None = None


def server_place(
    project: Project, launcher: Launcher, server: Server, python: str, start_id: str, port: int = 0
) -> Place:
    """Return where and as what a server is started; `port` 0 is the target's own or else a free one."""
    target, model = project.config.targets[server.target], project.config.models[project.model_name(server)]
    return Place(
        python=python,
        port=port or target.port or launcher.free_port(),
        start_id=start_id,
        host=target.host,
        build=target.sglang_build if server.engine == "sglang" else "",
        allow_hybrid_unsafe=model.hybrid and model.allow_hybrid_unsafe,
        **project.model_paths(server),
    )


def passed_environment(target: Target) -> dict[str, str]:
    """Return the variables of this process's environment that a target's servers get; their values stay unrecorded."""
    return {name: os.environ[name] for name in target.pass_env if name in os.environ}


def secret_values(project: Project, target: str) -> tuple[str, ...]:
    """Return the values of the variables with secrets that a target's servers or requests get: none is recorded."""
    spec = project.config.targets[target]
    names = [*filter(SECRET_KEY.search, spec.pass_env), *([spec.api_key_env] if spec.api_key_env else [])]
    return tuple(os.environ[name] for name in names if name in os.environ)


def start_planned(
    project: Project, launcher: Launcher, server: Server, python: str, start: Start, report: Callable[[str], None]
) -> Start:
    """Start a server and wait until it answers; raises as `start_server` does."""
    target = project.config.targets[server.target]
    ready = start_server(
        launcher,
        server,
        server_place(project, launcher, server, python, start.start_id),
        log_path=start.log_path,
        stop_grace_s=target.stop_grace_s,
        timeout_s=target.start_timeout_s,
        progress=report,
        private_env=passed_environment(target),
    )
    endpoint = Endpoint(launcher.base_url(), served_model_name(server), {})
    return replace(start, endpoint=endpoint, ready_s=ready.seconds, server_info=kept(ready.server_info))


def meet_external(
    project: Project, server: Server, workload: Workload, start: Start, host_key: str, report: Callable[[str], None]
) -> Start:
    """See that an external endpoint answers a completion of a workload's kind and is what was planned.

    `host_key` is that of the record that it agrees with. Raises TargetError, WrongServer among them.
    """
    endpoint = external_endpoint(project, server)
    short = replace(workload, max_tokens=FIRST_TOKENS)
    # The streaming of the measured requests is no part of what is asked here.
    body = {k: v for k, v in request_body(short, FIRST_PROMPT, endpoint.model).items() if not k.startswith("stream")}
    answered = see_answer(
        endpoint,
        server,
        path=PATHS[workload.endpoint],
        body=body,
        timeout_s=project.config.targets[server.target].start_timeout_s,
        progress=report,
    )
    read_back = {"confirmed": list(answered.confirmed), "not_confirmed": list(answered.not_confirmed)}
    info = None if answered.server_info is None else kept(answered.server_info)
    told = replace(start, endpoint=endpoint, server_info=info, read_back=read_back, started=answered.started)
    return replace(told, start_id=external_start_id(endpoint.base_url, host_key, answered.started))


def external_start_id(url: str, host_key: str, started: str | None) -> str:
    """Return the id of the start that an endpoint runs on: its own, or as long as it tells none, one for all runs.

    Repeats on one running server are so known as what they are: no fresh starts.
    """
    return keys.digest([endpoint_of(url), host_key, started])[:12]
