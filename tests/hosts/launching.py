"""Launchers for the lab's hosts, servers that they start there, and what is left of both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from lab import Lab
from logins import Scope
from nspawn import Host

from ddtree_bench.plan import ModelRef, Server
from ddtree_bench.targets.launcher import Launch, ServerState
from ddtree_bench.targets.ssh.launcher import SshLauncher
from ddtree_bench.targets.ssh.place import HostPlace

PYTHON = "/usr/bin/python3"
PROGRAMS = "/opt/tests"
"""Where the hosts have the servers of the unit tests."""

TINY = f"{PROGRAMS}/tiny_server.py"
BIND = {PROGRAMS: Path(__file__).parents[1] / "unit"}

TOY_ENGINE = "/opt/toy/bin/python"
TOY = Server("toy-ar", "box", "reference", "e" * 64, ModelRef("toy", "1"), None, "AR")

OF_LAUNCHERS = (
    "find /run -name 'ddtree-bench-*'; grep -lsaE '[t]iny_server|[t]oy_engine|[l]ease_keeper' /proc/[0-9]*/cmdline"
)


@dataclass
class Ground:
    """A login of a host for one test, with leases and logs of the test's own."""

    lab: Lab
    host: Host
    folder: Path
    user: str = "root"
    scope: Scope = "system"
    said: list[str] = field(default_factory=list)
    launchers: list[SshLauncher] = field(default_factory=list)
    leases: str = field(default_factory=lambda: f"/var/tmp/leases-{uuid4().hex[:8]}")

    def launcher(self, **more: Any) -> SshLauncher:
        """A launcher; two of them share the lease, as two processes of one workflow do."""
        place = HostPlace(
            name="box",
            ssh_host=f"{self.user}@{self.host.name}",
            ssh_config=self.lab.client_config,
            scope=self.scope,
            root="~/ddtree-bench",
            cache=self.folder / "cache",
            lease_directory=self.leases,
            lease_ttl_s=30.0,
            reconnect_s=60.0,
        )
        self.launchers.append(SshLauncher(replace(place, **more), "machine", self.said.append))
        return self.launchers[-1]

    @contextmanager
    def leased(self, **more: Any) -> Iterator[SshLauncher]:
        """A launcher that holds the lease; what it has started is stopped at the end."""
        launcher = self.launcher(**more)
        with launcher.acquire("run-1", 0, self.said.append):
            try:
                yield launcher
            finally:
                launcher.stop()

    def launch(self, port: int, *argv: str, **more: Any) -> Launch:
        """A start of a command line, with a log of its own."""
        log = self.folder / "logs" / f"server-{uuid4().hex[:12]}.log"
        return Launch(**{"name": "tiny", "argv": argv, "port": port, "log_path": log, "stop_grace_s": 2.0, **more})

    def tiny(self, launcher: SshLauncher, *options: str, **more: Any) -> Launch:
        """A start of the tiny server."""
        port = more.pop("port", None) or launcher.free_port()
        return self.launch(port, PYTHON, TINY, "--port", str(port), *options, **more)

    def left(self) -> str:
        """What units, files and processes the host still has of launchers, of this and any other test."""
        return str(self.host.exec("sh", "-c", OF_LAUNCHERS, check=False))

    def unit(self, kind: str = "server") -> str:
        """The one unit of a kind, server or lease, that the host has."""
        (path,) = self.host.exec("find", "/run", "-name", f"ddtree-bench-{kind}-*.service").split()
        return Path(path).name

    def close(self) -> None:
        """Let go of the host."""
        for launcher in self.launchers:
            launcher.close()


def write_toy_engine(host: Host, *options: str) -> None:
    """Give a host the toy engine under the name of an environment's interpreter."""
    text = f'#!/bin/sh\nexec {PYTHON} {PROGRAMS}/toy_engine.py {" ".join(options)} "$@"\n'
    host.write_file(TOY_ENGINE, text, mode=0o755)


def once_ended(launcher: SshLauncher, timeout_s: float = 20.0) -> ServerState:
    """The state of a server once it is known to be no more."""
    deadline = time.monotonic() + timeout_s
    while (state := launcher.state()).alive:
        assert time.monotonic() < deadline, state
        time.sleep(0.05)
    return state
