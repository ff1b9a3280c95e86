"""A host as this workflow uses it: its connection, its systemd, an interpreter and the package's own programs on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddtree_bench.targets import host_tools
from ddtree_bench.targets.launcher import CommandResult, Stream, TargetError
from ddtree_bench.targets.sole_writer import sole_writer
from ddtree_bench.targets.ssh.agent import HostAgent
from ddtree_bench.targets.ssh.connection import Connection
from ddtree_bench.targets.ssh.destination import resolve
from ddtree_bench.targets.ssh.failures import HostUnreachable
from ddtree_bench.targets.ssh.interpreter import fitting_python
from ddtree_bench.targets.ssh.place import HostPlace
from ddtree_bench.targets.ssh.systemd import Systemd
from ddtree_bench.targets.ssh.transfer import upload

COMMAND_S = 30.0
REACH_EVERY_S = 5.0

LOGIN = 'printf "%s\\n" "$HOME" "$(id -un)" "$(id -u)" "$(cat /proc/sys/kernel/random/boot_id)"'


@dataclass(frozen=True)
class Login:
    """Who this workflow is on a host, and since when the host is up: the id of its boot."""

    home: str
    user: str
    uid: int
    boot_id: str


class RemoteHost:
    """One host. Nothing is connected before it is needed; everything is as safe to repeat as its commands."""

    def __init__(self, place: HostPlace, report: Callable[[str], None]) -> None:
        self.place = place
        self.destination = resolve(place.ssh_host, place.ssh_config)
        self.connection = Connection(
            self.destination, reconnect_s=place.reconnect_s, report=lambda line: report(f"{place.name}: {line}")
        )
        self.systemd = Systemd(self.connection.run, place.scope, place.name)
        self._report = report
        self._pythons: dict[str, str] = {}

    @cached_property
    def login(self) -> Login:
        """Who this workflow is there. Raises ConnectionFailed when the host cannot be reached."""
        return self.look()

    def reach(self, report: Callable[[str], None]) -> None:
        """Connect, trying again for as long as a lost link is. Raises ConnectionFailed."""
        deadline = time.monotonic() + self.place.reconnect_s
        while True:
            try:
                self.look()
                return
            except HostUnreachable as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                report(f"{self.place.name}: {error}; trying again for {left_s:.0f} s more")
                time.sleep(min(REACH_EVERY_S, left_s))

    def look(self) -> Login:
        """Ask the host anew who this workflow is there, and which boot it runs on."""
        result = self.connection.run(["sh", "-c", LOGIN], timeout_s=COMMAND_S)
        lines = result.stdout.splitlines()
        if result.exit_code != 0 or len(lines) != 4:
            raise TargetError(
                f"{self.place.name}: {self.destination.name}: a command there gave {result.stdout[-200:]!r} "
                f"{result.stderr[-200:]!r}; the login's shell must run commands and print nothing of its own"
            )
        return Login(lines[0], lines[1], int(lines[2]), lines[3])

    def expand(self, path: str) -> str:
        """The absolute path on the host of one that may begin with ~."""
        if path == "~" or path.startswith("~/"):
            return f"{self.login.home.rstrip('/')}{path[1:]}"
        return path

    @cached_property
    def root(self) -> str:
        """The folder that holds what is deployed."""
        return self.expand(self.place.root).rstrip("/")

    def python(self, tag: str) -> str:
        """The interpreter there for wheels of a tag; put below the root where there is none."""
        if tag not in self._pythons:
            self._pythons[tag] = fitting_python(self.connection, self.root, tag, self.place.cache, self._report)
        return self._pythons[tag]

    @cached_property
    def tools(self) -> str:
        """The archive of this package on the host; sent when it is not there."""
        archive = host_tools.archive(self.place.cache)
        there = f"{self.root}/tools/{archive.name}"
        with sole_writer(self.connection.stream, f"{self.root}/tools.lock", self._report):
            upload(self.connection, archive, there, self._report)
        return there

    def module(self, name: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment that run a module of the package on the host."""
        return host_tools.command(self.python("py3"), self.tools, name, *arguments)

    def open_module(self, name: str, on_line: Callable[[str], None], *arguments: str) -> Stream:
        """Start a module of the package on the host, and take its lines as they come."""
        argv = host_tools.command_line(self.python("py3"), self.tools, name, *arguments)
        return self.connection.stream(argv, on_line)

    @property
    def unit_user(self) -> str | None:
        """Who units are to run as, where that is not whom the service manager belongs to."""
        return None if self.login.uid == 0 or self.place.scope == "user" else self.login.user

    @cached_property
    def agent(self) -> HostAgent:
        """The host agent; the conversation is opened by the first call of `open`."""
        return HostAgent(lambda on_line: self.open_module("ddtree_bench.targets.host_agent", on_line))

    def run(self, argv: Sequence[str], *, timeout_s: float = COMMAND_S, stdin: str = "") -> CommandResult:
        """Run a command to its end."""
        return self.connection.run(argv, timeout_s=timeout_s, stdin=stdin)

    def ask(self, operation: str, **values: Any) -> dict[str, Any]:
        """Ask the host agent, again if the link was lost meanwhile: its operations may be repeated."""

        def attempt(_: object) -> dict[str, Any]:
            self.agent.open()
            return self.agent.ask(operation, **values)

        return self.connection.repeated(attempt)

    def close(self) -> None:
        """Let go of the connection, and with it of the agent."""
        self.connection.close()
