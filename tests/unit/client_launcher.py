"""Launchers for tests of load clients on the target: processes of this machine, beside an endpoint or a server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cut_link import LinkedLauncher

from ddtree_bench.targets import commands, host_tools
from ddtree_bench.targets.external import ExternalLauncher
from ddtree_bench.targets.launcher import CommandResult, Launcher, ServerState, Stream
from ddtree_bench.targets.local import LocalLauncher


class Clients(Launcher):
    """Runs clients on this machine and keeps what they print; `log` is the server's log."""

    def __init__(self, root: Path, *arguments: Any, log: Path | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._root = root
        self._log = log
        self.clients: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: list[str] = []

    def close(self) -> None:
        """End the clients that are left."""
        for name in self.clients:
            self.stop_client(name)

    def fetch_log(self) -> Path | None:
        return self._log

    def log_argv(self) -> list[str]:
        return [] if self._log is None else ["cat", str(self._log)]

    def start_client(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        with (self._root / f"{name}.said").open("wb") as said:
            self.clients[name] = subprocess.Popen(
                argv, env={**os.environ, **env}, stdout=said, stderr=said, cwd="/", start_new_session=True
            )

    def client_state(self, name: str) -> ServerState:
        code = self.clients[name].poll()
        return ServerState(code is None, self.clients[name].pid, code, reason=None if code is None else "exited")

    def client_log(self, name: str) -> str:
        return (self._root / f"{name}.said").read_text()

    def stop_client(self, name: str) -> None:
        if self.clients[name].poll() is None:
            os.killpg(self.clients[name].pid, signal.SIGTERM)
            self.stopped.append(name)
        self.clients[name].wait()


class ClientLauncher(Clients, ExternalLauncher):
    """An endpoint, and the folder `root` of this machine for its target."""

    def __init__(self, root: Path, url: str, log: Path | None = None) -> None:
        super().__init__(root, root / "leases", url, log=log)

    def expand(self, path: str) -> str:
        return str(Path(path).absolute())

    def copy_in(self, source: Path, destination: str, report: Callable[[str], None] | None = None) -> None:
        Path(destination).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, destination)

    def copy_out(self, source: str, destination: Path) -> None:
        shutil.copytree(source, destination)

    def run_command(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str = "",
        report: Callable[[str], None] | None = None,
    ) -> CommandResult:
        return commands.run(argv, timeout_s=timeout_s, stdin=stdin, report=report)

    def open_stream(self, argv: Sequence[str], on_line: Callable[[str], None]) -> Stream:
        return commands.LocalStream(argv, on_line)

    def tools(self) -> str:
        return str(host_tools.archive(self._root / "tools"))


class StartedLauncher(Clients, LinkedLauncher):
    """Servers that are started behind a link that holds, measured from beside them.

    What ended a server is known `noticed_s` seconds after it was first asked for. With `dies_fetched` the server is
    killed while an outcome is on its way here.
    """

    def __init__(self, root: Path, noticed_s: float = 0.0, dies_fetched: bool = False) -> None:
        super().__init__(root, root)
        self._noticed_s = noticed_s
        self._dies_fetched = dies_fetched
        self._asked: float | None = None

    def target_url(self) -> str:
        return LocalLauncher.base_url(self)

    def fetch_log(self) -> Path | None:
        return LocalLauncher.fetch_log(self)

    def state(self) -> ServerState:
        state = super().state()
        if state.alive:
            return state
        self._asked = self._asked or time.monotonic()
        return state if time.monotonic() - self._asked >= self._noticed_s else ServerState(True, state.pid)

    def copy_out(self, source: str, destination: Path) -> None:
        if self._dies_fetched and (pid := self.state().pid) is not None:
            os.kill(pid, signal.SIGKILL)
            while self.state().alive:
                time.sleep(0.05)
        super().copy_out(source, destination)
