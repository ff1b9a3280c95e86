"""Waiting until the server that was just started, and no other, answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree_bench.plan import Server
from ddtree_bench.servers import api
from ddtree_bench.servers.command_line import served_model_name
from ddtree_bench.servers.identity import differences
from ddtree_bench.targets.launcher import ServerState, TargetError

POLL_S = 0.1
PROGRESS_EVERY_S = 10.0
LOG_LINES = 20


class ServerFailed(RuntimeError):
    """The server under test is at fault: a result, recorded with its reason and the end of its log."""

    def __init__(self, reason: str, log_tail: str) -> None:
        super().__init__(f"{reason}\n{log_tail}".rstrip())
        self.reason = reason
        self.log_tail = log_tail


class WrongServer(TargetError):
    """What answers on the port is not the server that was started."""


@dataclass(frozen=True)
class Ready:
    """A server that answered: what it says of itself, and the seconds from the start of the wait to its answer."""

    server_info: dict[str, Any]
    seconds: float


def wait_until_ready(
    base_url: str,
    server: Server,
    start_id: str,
    *,
    state: Callable[[], ServerState],
    log_tail: Callable[[int], str],
    timeout_s: float,
    progress: Callable[[str], None],
) -> Ready:
    """Wait until the server is healthy, is the one that was started, and has answered one completion.

    Raises ServerFailed at once when the process ends by itself, or when it is not ready after `timeout_s` seconds;
    WrongServer when what it says of itself differs from what was asked for; TargetError when others ended it.
    """
    began = time.monotonic()

    def failed(reason: str) -> ServerFailed:
        return ServerFailed(reason, log_tail(LOG_LINES))

    def see_alive() -> None:
        seen = state()
        if seen.alive:
            return
        reason = f"server {server.name} {seen} after {time.monotonic() - began:.1f} s, before it was ready"
        raise failed(reason) if seen.ended_by_itself else TargetError(reason)

    next_progress = began + PROGRESS_EVERY_S
    while not api.health(base_url):
        see_alive()
        now = time.monotonic()
        if now - began > timeout_s:
            raise failed(
                f"server {server.name} was not ready within {timeout_s:.0f} s; see its log, "
                f"or raise targets.{server.target}.start_timeout_s"
            )
        if now >= next_progress:
            last = log_tail(1)
            progress(f"{server.name}: loading for {now - began:.0f} s of at most {timeout_s:.0f} s: {last}")
            next_progress = now + PROGRESS_EVERY_S
        time.sleep(POLL_S)
    try:
        info = api.server_info(base_url)
        check_identity(server, start_id, info)
        tokens = api.first_completion(base_url, served_model_name(server), timeout_s)
    except api.ApiError as error:
        see_alive()
        raise failed(f"server {server.name} is up but does not answer: {error}") from error
    if tokens < 1:
        raise failed(f"server {server.name} answered its first completion with no token")
    seconds = time.monotonic() - began
    progress(f"{server.name}: ready after {seconds:.1f} s")
    return Ready(info, seconds)


def check_identity(server: Server, start_id: str, info: dict[str, Any]) -> None:
    """Hold what the server says of itself against what was launched; raises WrongServer naming each difference."""
    wrong = differences(server, start_id, info)
    if wrong:
        raise WrongServer(
            f"what answers is not server {server.name} as it was started: {'; '.join(wrong)}; "
            "another server on this port, or a launch option that the engine did not take"
        )
