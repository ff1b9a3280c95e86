"""One server in the foreground, started exactly as a run starts it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddtree_bench.plan import Server
from ddtree_bench.servers.command_line import Place
from ddtree_bench.servers.ready import LOG_LINES, ServerFailed
from ddtree_bench.servers.start import start_server
from ddtree_bench.targets.launcher import Launcher
from ddtree_bench.targets.lifeline import Interrupted, Interruption

LOOK_EVERY_S = 0.5


def serve(
    launcher: Launcher,
    server: Server,
    place: Place,
    *,
    log_path: Path,
    lease_wait_s: float,
    stop_grace_s: float,
    timeout_s: float,
    report: Callable[[str], None],
    private_env: Mapping[str, str] | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then stop the server and return; call it in the main thread.

    `announce` gets the base URL once the server answers, `report` what happens before. Raises ServerFailed, with the
    end of its log, when the server ends by itself or does not become ready, and TargetError when the target is at
    fault; the server is stopped in every case.
    """
    try:
        with Interruption() as interruption, launcher.acquire(f"serve {server.name}", lease_wait_s, report):
            try:
                start_server(
                    launcher,
                    server,
                    place,
                    log_path=log_path,
                    stop_grace_s=stop_grace_s,
                    timeout_s=timeout_s,
                    progress=report,
                    private_env=private_env,
                )
                announce(launcher.base_url())
                while launcher.state().alive:
                    time.sleep(LOOK_EVERY_S)
                raise ServerFailed(f"server {server.name} {launcher.state()}", launcher.log_tail(LOG_LINES))
            finally:
                with interruption.shielded():
                    launcher.stop()
    except Interrupted as interrupted:
        report(f"{server.name}: stopped, {interrupted}")
