"""The one interface of all launchers: how a server is started, watched and stopped on a target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GONE = "accepts no connections any more"


class TargetError(RuntimeError):
    """The target, not the server under test, is at fault: unreachable, taken, port in use, files left over."""


class PortInUse(TargetError):
    """The port that the server was to listen on belongs to another process."""


class StopFailed(TargetError):
    """Processes or the port of a stopped server are still there."""


@dataclass(frozen=True)
class Launch:
    """One start of one server. `log_path` lies on the target; `env` is added to the launcher's small environment."""

    name: str
    argv: tuple[str, ...]
    port: int
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = 10.0

    @property
    def state_path(self) -> Path:
        """Where the watchdog records what became of the server, beside its log."""
        return self.log_path.with_suffix(".state.json")


@dataclass(frozen=True)
class ServerState:
    """What became of a server. `reason` says who ended it: exited, requested, lease, not started, watchdog killed; of
    an external endpoint it is GONE.
    """

    alive: bool
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None

    @property
    def ended_by_itself(self) -> bool:
        """True for an end of the server's own: no stop that was asked for, no lost lease, no killed watchdog.

        Why an external endpoint is GONE nobody knows: somebody stopped it, or the network is down.
        """
        return not self.alive and self.reason in ("exited", "not started")

    def __str__(self) -> str:
        if self.alive:
            return "running" if self.pid is None else f"running as process {self.pid}"
        if self.reason == GONE:
            return GONE
        if self.signal is not None:
            how = f"ended by signal {self.signal}"
        elif self.exit_code is not None:
            how = f"ended with exit status {self.exit_code}"
        else:
            how = "ended"
        return how if self.reason in (None, "exited") else f"{how} ({self.reason})"


@dataclass(frozen=True)
class CommandResult:
    """What a command on the target returned; stdout and stderr are text."""

    exit_code: int
    stdout: str
    stderr: str


class Launcher(ABC):
    """Runs at most one server on a target at a time, under the lease of that target."""

    shares_files: bool
    """True when the target sees this machine's files at the same paths, so that nothing need be copied."""

    @abstractmethod
    def acquire(self, run: str, wait_s: float, report: Callable[[str], None]) -> AbstractContextManager[Any]:
        """Take the target's lease for the run named `run`; it is held until the block ends.

        Reports who holds it while it waits; raises TargetBusy, which names that owner, after `wait_s` seconds.
        """

    @abstractmethod
    def free_port(self) -> int:
        """A port of the target that nothing listens on now."""

    @abstractmethod
    def start(self, launch: Launch) -> None:
        """Start the server; returns at once, ready or not. Raises TargetError, PortInUse among them."""

    @abstractmethod
    def state(self) -> ServerState:
        """What the server that was started last is doing now."""

    @abstractmethod
    def stop(self) -> ServerState:
        """Stop the server if it runs and see that nothing of it is left; returns how it ended.

        Safe to call at any time and more than once. Raises StopFailed when processes or the port remain.
        """

    @abstractmethod
    def stop_all(self) -> list[str]:
        """Stop every server that was started under this launcher's lease by anybody's run as this user, named in words.

        For servers whose own measuring process is gone or hangs. Raises StopFailed for what cannot be stopped.
        """

    @abstractmethod
    def base_url(self) -> str:
        """Where a client on this machine reaches the server that was started last, http://HOST:PORT."""

    @abstractmethod
    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the server wrote."""

    @abstractmethod
    def copy_in(self, source: Path, destination: str) -> None:
        """Copy a file or folder of this machine to the target."""

    @abstractmethod
    def copy_out(self, source: str, destination: Path) -> None:
        """Copy a file or folder of the target to this machine."""

    @abstractmethod
    def run_command(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str = "",
        report: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run a command on the target to its end; `report` gets each line of its output as it comes.

        Raises TargetError when the command cannot be started or does not end within `timeout_s`.
        """


def create_launcher(
    kind: str, *, lease_directory: Path | None = None, lease_name: str = "machine", url: str | None = None
) -> Launcher:
    """The launcher of a kind; raises TargetError for a kind that does not exist, naming those that do.

    `url` is the address of an external endpoint, whose lease is named after it.
    """
    from ddtree_bench.targets.external import ExternalLauncher
    from ddtree_bench.targets.lease import DEFAULT_DIRECTORY
    from ddtree_bench.targets.local import LocalLauncher

    directory = lease_directory or DEFAULT_DIRECTORY
    if kind == "external" and url is not None:
        return ExternalLauncher(directory, url)
    if kind != "local":
        raise TargetError(f"launcher: {kind!r} does not exist; launchers: local, external")
    return LocalLauncher(directory, lease_name)
