"""Waiting until the server that was just started, and no other, answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ddtree_bench.plan import Server
from ddtree_bench.servers import api
from ddtree_bench.servers.command_line import served_model_name
from ddtree_bench.servers.identity import differences
from ddtree_bench.servers.loading import loading_line
from ddtree_bench.targets.launcher import LINK_LOST, LinkRecord, ServerState, TargetError, TargetLost, ended_by_others

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


def _no_link() -> AbstractContextManager[Callable[[], LinkRecord]]:
    return nullcontext(LinkRecord)


@dataclass(frozen=True)
class Ready:
    """A server that answered: what it says of itself, and the seconds from the start of the wait to its answer."""

    server_info: dict[str, Any]
    seconds: float


def wait_until_ready(
    base_url: Callable[[], str],
    server: Server,
    start_id: str,
    *,
    state: Callable[[], ServerState],
    log_tail: Callable[[int], str],
    timeout_s: float,
    progress: Callable[[str], None],
    watched_link: Callable[[], AbstractContextManager[Callable[[], LinkRecord]]] = _no_link,
) -> Ready:
    """Wait until the server is healthy, is the one that was started, and has answered one completion.

    What fails while the link to the server is cut says nothing of the server, and is tried again; `watched_link` is
    the launcher's, and `base_url` is asked again then. Raises ServerFailed at once when the process ends by itself, or
    when it is not ready after `timeout_s` seconds; WrongServer when what it says of itself differs from what was asked
    for; TargetError when others ended it, or when it was out of reach at the end of that time.
    """
    wait = _Wait(server, state, log_tail, timeout_s, progress)
    while True:
        with watched_link() as link:
            url = base_url()
            try:
                if not wait.becomes_healthy(url, link):
                    continue
                ready = _answered(url, server, start_id, wait)
            except (ServerFailed, api.ApiError) as error:
                if link().broken is None:
                    raise wait.failure(error) from error
                continue
        progress(f"{server.name}: ready after {ready.seconds:.1f} s")
        return ready


class _Wait:
    """A wait for one server, which ends with the server or with its time."""

    def __init__(
        self,
        server: Server,
        state: Callable[[], ServerState],
        log_tail: Callable[[int], str],
        timeout_s: float,
        progress: Callable[[str], None],
    ) -> None:
        self._server = server
        self._state = state
        self._log_tail = log_tail
        self.timeout_s = timeout_s
        self._progress = progress
        self._began = time.monotonic()
        self._next_progress_s = PROGRESS_EVERY_S

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._began

    def becomes_healthy(self, base_url: str, link: Callable[[], LinkRecord]) -> bool:
        """Wait until the server is healthy; False when the link was cut meanwhile. Raises what ends the wait."""
        while not api.health(base_url):
            seen = self._see_alive()
            if self.seconds > self.timeout_s:
                self._end(seen)
            due = self.seconds >= self._next_progress_s
            if due:
                self._progress(self._loading(seen))
                self._next_progress_s = self.seconds + PROGRESS_EVERY_S
            # Asked now and then all the same: a way to the server can end while its state is still known.
            if (due or seen.reason == LINK_LOST) and link().broken is not None:
                return False
            time.sleep(POLL_S)
        return True

    def failed(self, reason: str) -> ServerFailed:
        """The failure of the server, with the end of its log."""
        return ServerFailed(reason, self._log_tail(LOG_LINES))

    def failure(self, error: ServerFailed | api.ApiError) -> ServerFailed:
        """The failure that an error stands for. Raises another one when the server has ended."""
        if isinstance(error, ServerFailed):
            return error
        self._see_alive()
        return self.failed(f"server {self._server.name} is up but does not answer: {error}")

    def _see_alive(self) -> ServerState:
        seen = self._state()
        if seen.alive:
            return seen
        reason = f"server {self._server.name} {seen} after {self.seconds:.1f} s, before it was ready"
        raise self.failed(reason) if seen.ended_by_itself else ended_by_others(seen, reason)

    def _end(self, seen: ServerState) -> NoReturn:
        reason = f"server {self._server.name} was not ready within {self.timeout_s:.0f} s"
        remedy = f"raise targets.{self._server.target}.start_timeout_s"
        if seen.reason == LINK_LOST:
            raise TargetLost(f"{reason}, and the link to it is lost; see to the network, or {remedy}")
        raise self.failed(f"{reason}; see its log, or {remedy}")

    def _loading(self, seen: ServerState) -> str:
        how = f"{self._server.name}: loading for {self.seconds:.0f} s of at most {self.timeout_s:.0f} s"
        return f"{how}: {LINK_LOST if seen.reason == LINK_LOST else loading_line(self._log_tail(LOG_LINES))}"


def _answered(base_url: str, server: Server, start_id: str, wait: _Wait) -> Ready:
    info = api.server_info(base_url)
    check_identity(server, start_id, info)
    tokens = api.first_completion(base_url, served_model_name(server), wait.timeout_s)
    if tokens < 1:
        raise wait.failed(f"server {server.name} answered its first completion with no token")
    return Ready(info, wait.seconds)


def see_again(
    base_url: str,
    server: Server,
    start_id: str,
    *,
    state: Callable[[], ServerState],
    log_path: Path,
    timeout_s: float,
) -> None:
    """See that a server that was out of reach is healthy and the one it was.

    Raises TargetError when it is not so within `timeout_s` seconds, WrongServer when another one answers.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            check_identity(server, start_id, api.server_info(base_url))
            if api.health(base_url):
                return
            error = "it is not healthy"
        except api.ApiError as failure:
            error = str(failure)
        seen = state()
        if not seen.alive or time.monotonic() > deadline:
            raise TargetLost(
                f"targets.{server.target}: server {server.name} does not answer since the link to it was cut ({seen}): "
                f"{error}; see its log, {log_path}, and run again"
            )
        time.sleep(POLL_S)


def check_identity(server: Server, start_id: str, info: dict[str, Any]) -> None:
    """Hold what the server says of itself against what was launched; raises WrongServer naming each difference."""
    wrong = differences(server, start_id, info)
    if wrong:
        raise WrongServer(
            f"what answers is not server {server.name} as it was started: {'; '.join(wrong)}; "
            "another server on this port, or a launch option that the engine did not take"
        )
