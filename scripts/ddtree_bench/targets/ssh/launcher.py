"""The ssh launcher: servers are systemd units of a host, bound to its lease; clients reach them through OpenSSH."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddtree_bench.targets.launcher import CommandResult, Launch, Launcher, LinkRecord, ServerState, Stream, TargetError
from ddtree_bench.targets.lease import Owner
from ddtree_bench.targets.service_manager import OURS
from ddtree_bench.targets.ssh import held_lease, journal
from ddtree_bench.targets.ssh.bound_unit import client_unit, client_unit_name
from ddtree_bench.targets.ssh.ending import ending
from ddtree_bench.targets.ssh.held_lease import HeldLease
from ddtree_bench.targets.ssh.host import RemoteHost
from ddtree_bench.targets.ssh.place import HostPlace
from ddtree_bench.targets.ssh.remote_server import RemoteServer
from ddtree_bench.targets.ssh.transfer import download, upload

START_S = 60.0
END_S = 60.0


class SshLauncher(Launcher):
    """Servers of one host. Copies and commands go over one connection; measured requests never do."""

    shares_files = False

    def __init__(self, place: HostPlace, lease_name: str, report: Callable[[str], None]) -> None:
        self.host = RemoteHost(place, report)
        self._lease_name = lease_name
        self._report = report
        self._lease: HeldLease | None = None
        self._server: RemoteServer | None = None

    def acquire(self, run: str, wait_s: float, report: Callable[[str], None]) -> AbstractContextManager[Any]:
        """Have the host's keeper take the lease; units are bound to it until it is released."""
        self.host.systemd.require_rights()
        self._lease = held_lease.take(self.host, self._lease_name, run=run, wait_s=wait_s, report=report)
        return self._lease

    def free_port(self) -> int:
        """A port of the host's address that nothing listens on now."""
        return int(self.host.ask("free_port", host=self.host.place.address)["port"])

    def start(self, launch: Launch) -> None:
        """Install and start the unit of a server, and open the way to it. One that fails at once is a state too."""
        lease = self._held(f"server {launch.name}")
        lease.pulse.require_lease()
        if self._server is not None and not self._server.stopped and self._server.state().alive:
            raise TargetError(f"server {launch.name}: another server of this launcher still runs; stop it first")
        server = RemoteServer(self.host, lease, launch, self._report)
        server.require_free_port()
        self._server = server
        server.start()

    def state(self) -> ServerState:
        """What the host said of the server a moment ago; while it does not answer, that the link is lost.

        Takes less than half a second, until the server has ended and its end is looked into. Raises LinkLost when the
        host was not reached again for as long as it was to be tried.
        """
        return ServerState(alive=False) if self._server is None else self._server.state()

    def stop(self) -> ServerState:
        """Stop the unit, take the rest of its log, remove it, and see that port and GPUs are free."""
        return ServerState(alive=False) if self._server is None else self._server.stop()

    def stop_all(self) -> list[str]:
        """End the lease on this host if it is this user's, of whichever measuring process, and with it its servers."""
        path = self.host.place.lease_path(self._lease_name)
        holder = self.host.ask("holder", lease=path)
        if holder["owner"] is None:
            return []
        owner = Owner.read(holder["owner"])
        if (owner.user, owner.host) != (getpass.getuser(), socket.gethostname()):
            self._report(f"{self.host.place.name}: left alone, for the lease is held by {holder['words']}")
            return []
        systemd = self.host.systemd
        units = [unit for unit in systemd.units(OURS) if unit.alive]
        keepers = [unit.name for unit in units if unit.description == held_lease.keeper_words(path, owner)]
        bound = [unit for unit in units if not set(keepers).isdisjoint(unit.binds_to)]
        for keeper in keepers:
            systemd.stop(keeper, END_S)
        for name in (*keepers, *(unit.name for unit in bound)):
            systemd.remove(name)
        return [f"{unit.description} (process {unit.main_pid})" for unit in bound]

    def base_url(self) -> str:
        """The end of the way to the server on this machine."""
        return self._started.way.base_url

    def target_url(self) -> str:
        """Where a client on the host reaches the server that was started last, http://HOST:PORT."""
        return f"http://{self.host.place.address}:{self._started.launch.port}"

    def fetch_log(self) -> Path | None:
        """Append what the unit has written since the last call, until now, to the log on this machine."""
        if self._server is None:
            return None
        time.sleep(journal.LAG_S)
        self._server.log.fetch()
        return self._server.log.path

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log; those that came here before when the host cannot be asked."""
        return "" if self._server is None else self._server.log_tail(lines)

    def python(self, tag: str) -> str:
        """The host's interpreter for wheels of a tag; one is sent where there is none."""
        return self.host.python(tag)

    def expand(self, path: str) -> str:
        """The absolute path on the host."""
        return self.host.expand(path)

    def tools(self) -> str:
        """The archive of this package on the host."""
        return self.host.tools

    def copy_in(self, source: Path, destination: str, report: Callable[[str], None] | None = None) -> None:
        """Send a file or folder; what is there already is not sent again."""
        upload(self.host.connection, source, destination, report or self._report)

    def copy_out(self, source: str, destination: Path) -> None:
        """Fetch a file or folder."""
        download(self.host.connection, source, destination, self._report)

    def run_command(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str = "",
        report: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run a command of the login to its end, again if the link was lost meanwhile."""
        return self.host.connection.run(argv, timeout_s=timeout_s, stdin=stdin, report=report)

    def open_stream(self, argv: Sequence[str], on_line: Callable[[str], None]) -> Stream:
        """Start a command of the login, and take its lines as they come; it ends with the link."""
        return self.host.connection.stream(argv, on_line)

    def start_client(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a load client as a unit that is bound to the lease."""
        unit = client_unit(self.host, self._held(f"client {name}"), name, tuple(argv), env)
        self.host.systemd.install(unit)
        self.host.systemd.start(unit.name, START_S)

    def client_state(self, name: str) -> ServerState:
        """What the unit of a client does now; asked of the host at every call."""
        shown = self.host.systemd.state(client_unit_name(name))
        if shown.alive:
            return ServerState(alive=True, pid=shown.main_pid)
        return ending(self.host, self._held(f"client {name}").unit, shown, str)

    def stop_client(self, name: str) -> None:
        """Stop and remove the unit of a client."""
        self.host.systemd.stop(client_unit_name(name), END_S)
        self.host.systemd.remove(client_unit_name(name))

    def client_log(self, name: str) -> str:
        """What a client on the host has written."""
        return self.host.systemd.journal(client_unit_name(name), None, ended=True)[0]

    def log_argv(self) -> list[str]:
        """The command on the host that prints what the server has written since its start."""
        return self.host.systemd.log_argv(self._started.unit.name)

    @contextmanager
    def watched_link(self) -> Iterator[Callable[[], LinkRecord]]:
        """Watch the pulse and the way to the server; both must have held for what was measured to count."""
        begun, pulse, server = time.monotonic(), self._held("the link").pulse, self._server

        def record() -> LinkRecord:
            link = pulse.record(begun)
            broken = None if server is None else server.way.break_since(begun)
            return replace(link, broken=link.broken or broken)

        yield record

    def reach(self, report: Callable[[str], None]) -> None:
        """Wait for the host, which may be starting again, as long as for a lost link."""
        self.host.reach(report)

    def close(self) -> None:
        """Let go of the connection to the host, for good."""
        self.host.close()

    def clock_offset_s(self) -> float:
        """The host's CLOCK_MONOTONIC less that of this machine, as the shortest round trip tells it."""
        return self._held("the clock").pulse.clock_offset_s

    @property
    def _started(self) -> RemoteServer:
        if self._server is None:
            raise TargetError("no server has been started on the host, so there is nothing to be reached or read")
        return self._server

    def _held(self, what: str) -> HeldLease:
        if self._lease is None or self._lease.released:
            raise TargetError(f"{what}: the target's lease must be acquired first")
        return self._lease
