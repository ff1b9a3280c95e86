"""One start of a server on a host: its unit, the way to it, its log, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from ddtree_bench.targets.launcher import LINK_LOST, Launch, PortInUse, ServerState, StopFailed, TargetError
from ddtree_bench.targets.ssh.bound_unit import server_unit
from ddtree_bench.targets.ssh.ending import ending, requested
from ddtree_bench.targets.ssh.failures import LinkLost
from ddtree_bench.targets.ssh.held_lease import HeldLease
from ddtree_bench.targets.ssh.host import RemoteHost
from ddtree_bench.targets.ssh.kept_forward import KeptForward
from ddtree_bench.targets.ssh.reasons import reason
from ddtree_bench.targets.ssh.server_log import ServerLog
from ddtree_bench.targets.unit_state import UnitState

START_S = 60.0
END_S = 20.0

STOP_PATIENCE_S = 10.0
"""How long a lost link is tried again for a stop: without it the lease ends the server."""

LOOK_EVERY_S = 0.5

CAUSE_LINES = 400
"""Lines of the log in which the cause of an end is looked for: eight ranks leave long traces."""

GPU_SLACK_MIB = 512
"""What a GPU's memory in use may differ by before and after a server; drivers keep some."""


class RemoteServer:
    """A server that is about to be started under a lease. `way` leads to its port from this machine."""

    def __init__(self, host: RemoteHost, lease: HeldLease, launch: Launch, report: Callable[[str], None]) -> None:
        self.launch = launch
        self.unit = server_unit(host, lease, launch)
        self.log = ServerLog(host.systemd, self.unit.name, launch.log_path)
        self.way = KeptForward(host.destination, launch.port, host.place.address)
        self.stopped = False
        self._host = host
        self._keeper = lease.unit
        self._pulse = lease.pulse
        self._report = report
        self._gpu_memory_mib: list[int] | None = None
        self._ended: ServerState | None = None

    def require_free_port(self) -> None:
        """Raise PortInUse, which names the holder, when somebody else listens on the server's port."""
        asked = self._host.ask("port", port=self.launch.port, host=self._host.place.address)
        if not asked["free"]:
            raise PortInUse(
                f"{self._host.place.name}: port {self.launch.port}, wanted by server {self.launch.name}, is in use by "
                f"{asked['holder']}; end that process or choose another port"
            )

    def start(self) -> None:
        """Install and start the unit, and open the way to it. One that fails at once is a state too."""
        self._gpu_memory_mib = self._host.ask("gpu_memory")["used_mib"]
        self._host.systemd.install(self.unit)
        self._pulse.watch(self._host.systemd.start(self.unit.name, START_S, self.launch.private_env))
        self.way.start()

    def state(self) -> ServerState:
        """What the host said of the unit a moment ago; while it does not answer, that the link is lost.

        Raises LinkLost when the host was not reached again for as long as it was to be tried.
        """
        if self._ended is None:
            try:
                shown = self._pulse.look()
                if shown.alive:
                    return ServerState(alive=True, pid=shown.main_pid)
                self._ended = ending(self._host, self._keeper, shown, self._cause)
            except LinkLost:
                self._pulse.require_link()
                return ServerState(alive=True, reason=LINK_LOST)
        return self._ended

    def stop(self) -> ServerState:
        """Stop the unit, take the rest of its log, remove it, and see that port and GPUs are free."""
        if not self.stopped:
            with suppress(LinkLost):
                self.state()
            self.way.stop()
            with self._host.connection.patience(STOP_PATIENCE_S):
                self._stop()
        assert self._ended is not None
        return self._ended

    def _stop(self) -> None:
        shown = self._host.systemd.stop(self.unit.name, self.launch.stop_grace_s + END_S)
        self._fetch_rest()
        try:
            # Of a server that has ended by itself the port may be in use by whoever it found there.
            self._require_gone(with_port=self._ended is None)
        finally:
            self._host.systemd.remove(self.unit.name)
            self._ended = self._ended or requested(shown)
            self.stopped = True

    def log_tail(self, lines: int) -> str:
        """The last lines of the log; those that came here before when the host cannot be asked."""
        try:
            self.log.fetch()
        except LinkLost:
            self._report(f"{self._host.place.name}: the log is as of before the link was lost")
        return self.log.tail(lines)

    def _cause(self, shown: UnitState) -> str:
        return reason(shown, self.log_tail(CAUSE_LINES), self.unit)

    def _fetch_rest(self) -> None:
        try:
            self.log.fetch(ended=True)
        except TargetError as error:
            # The server's end matters more.
            self._report(f"{self._host.place.name}: the end of the log of {self.launch.name} is missing: {error}")

    def _require_gone(self, *, with_port: bool) -> None:
        """Raise StopFailed when the GPUs, or the port, of a stopped server are not free after a while."""
        deadline = time.monotonic() + END_S
        while problem := (with_port and self._port_left()) or self._gpu_memory_left():
            if time.monotonic() > deadline:
                raise StopFailed(f"{self._host.place.name}: server {self.launch.name} was stopped, but {problem}")
            time.sleep(LOOK_EVERY_S)

    def _port_left(self) -> str | None:
        port = self._host.ask("port", port=self.launch.port, host=self._host.place.address)
        return None if port["free"] else f"its port {self.launch.port} is in use by {port['holder']}; end that process"

    def _gpu_memory_left(self) -> str | None:
        before, now = self._gpu_memory_mib, self._host.ask("gpu_memory")["used_mib"]
        if before is None or now is None or len(before) != len(now):
            return None
        kept = max((after - first for first, after in zip(before, now, strict=True)), default=0)
        return f"{kept} MiB more of a GPU's memory are in use than before" if kept > GPU_SLACK_MIB else None
