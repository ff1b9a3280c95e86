"""One start of a server, the same for a run and for `serve`: command line, launcher, readiness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ddtree_bench.environments.variables import engine_variables
from ddtree_bench.plan import Server
from ddtree_bench.servers.command_line import Place, launch_argv
from ddtree_bench.servers.identity import start_variables
from ddtree_bench.servers.ready import Ready, wait_until_ready
from ddtree_bench.targets.launcher import Launch, Launcher


def start_server(
    launcher: Launcher,
    server: Server,
    place: Place,
    *,
    log_path: Path,
    stop_grace_s: float,
    timeout_s: float,
    progress: Callable[[str], None],
    private_env: Mapping[str, str] | None = None,
) -> Ready:
    """Start a server under the lease that the launcher holds and wait until it answers.

    `private_env` is added to the launcher's small environment, with what the engine's build and the start's name need.

    The caller stops it, also when this raises: TargetError, or ServerFailed as of `wait_until_ready`.
    """
    argv = tuple(launch_argv(server, place))
    launcher.start(
        Launch(
            server.name,
            argv,
            place.port,
            log_path,
            env={**engine_variables(server.engine, place.build), **start_variables(server, place.start_id)},
            private_env=private_env or {},
            stop_grace_s=stop_grace_s,
        )
    )
    return wait_until_ready(
        launcher.base_url,
        server,
        place.start_id,
        state=launcher.state,
        log_tail=launcher.log_tail,
        timeout_s=timeout_s,
        progress=progress,
        watched_link=launcher.watched_link,
    )
