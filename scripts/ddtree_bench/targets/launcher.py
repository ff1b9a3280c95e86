"""The one interface of all launchers: how a server is started, watched and stopped on a target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

GONE: Final = "accepts no connections any more"

LINK_LOST: Final = "link lost"
"""Reason of the state of a server that cannot be asked about at the moment: it counts as alive until it can."""

Reason = Literal[
    "exited",
    "requested",
    "lease",
    "not started",
    "watchdog killed",
    "stopped",
    "removed",
    "rebooted",
    "accepts no connections any more",
    "link lost",
]
"""Who ended a server: itself (exited), its launcher (requested), the end of the lease, or whoever killed its watchdog.

On a host also who stopped or removed its unit there, or started the host again. One that is not started never ran. The
last two are GONE, of an external endpoint, and LINK_LOST.
"""


class TargetError(RuntimeError):
    """The target, not the server under test, is at fault: unreachable, taken, port in use, files left over."""


class TargetLost(TargetError):
    """The target, the way to it, or its lease was lost meanwhile: the same may go well once it is back."""


class PortInUse(TargetError):
    """The port that the server was to listen on belongs to another process."""


class StopFailed(TargetError):
    """Processes or the port of a stopped server are still there."""


@dataclass(frozen=True)
class Launch:
    """One start of one server. `log_path` is where its log is kept on this machine.

    `env` is added to the launcher's small environment; so is `private_env`, whose values are shown to nobody.
    """

    name: str
    argv: tuple[str, ...]
    port: int
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    private_env: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = 10.0

    @property
    def state_path(self) -> Path:
        """Where the watchdog records what became of the server, beside its log."""
        return self.log_path.with_suffix(".state.json")


@dataclass(frozen=True)
class ServerState:
    """What became of a server. `why` says in words what ended it, where more is known than how it ended."""

    alive: bool
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: Reason | None = None
    why: str | None = None

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
        if self.why is not None:
            return self.why
        if self.signal is not None:
            how = f"ended by signal {self.signal}"
        elif self.exit_code is not None:
            how = f"ended with exit status {self.exit_code}"
        else:
            how = "ended"
        return how if self.reason in (None, "exited") else f"{how} ({self.reason})"


@dataclass(frozen=True)
class CommandResult:
    """What a command on the target returned; stdout and stderr are text.

    A command that a signal ended has its name, such as KILL, and the exit code -1.
    """

    exit_code: int
    stdout: str
    stderr: str
    signal: str | None = None


class Stream(Protocol):
    """A command on the target that goes on while lines of its output are taken."""

    @property
    def ended(self) -> bool:
        """True once the command, or the link to it, is gone."""

    def send(self, line: str) -> None:
        """Write a line to the command's input. Raises TargetError when it is gone."""

    def close(self) -> CommandResult:
        """Close the command's input and wait for its end; one that does not end within seconds is ended.

        The result has the end of stderr, and nothing of stdout: its lines were given as they came.
        """


@dataclass(frozen=True)
class LinkRecord:
    """What became of the link to the target during a while.

    Attributes
    ----------
    round_trips_s : tuple of float
        Round trips of the connection that commands take, about one a second.
    broken : str or None
        Why what was measured through the link meanwhile is not what it would have been.
    """

    round_trips_s: tuple[float, ...] = ()
    broken: str | None = None


def ended_by_others(state: ServerState, words: str) -> TargetError:
    """The error of a server that others ended: one whose host was started again may be begun again."""
    return TargetLost(words) if state.reason == "rebooted" else TargetError(words)


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
    def fetch_log(self) -> Path | None:
        """Bring the log of the server that was started last up to date here; None where it is not to be had."""

    @abstractmethod
    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the server wrote."""

    @abstractmethod
    def python(self, tag: str) -> str:
        """An interpreter of the target for wheels of a tag, such as cp311, or py3 for any.

        Where the target has none, one is put where environments are deployed. Raises TargetError when that cannot be.
        """

    @abstractmethod
    def expand(self, path: str) -> str:
        """The absolute path on the target of one that may begin with ~."""

    @abstractmethod
    def copy_in(self, source: Path, destination: str, report: Callable[[str], None] | None = None) -> None:
        """Copy a file or folder of this machine to the target; what is there already is not sent again."""

    @abstractmethod
    def copy_out(self, source: str, destination: Path) -> None:
        """Copy a file or folder of the target to this machine."""

    def target_url(self) -> str:
        """Where a client on the target reaches the server that was started last, http://HOST:PORT."""
        return self.base_url()

    def log_argv(self) -> list[str]:
        """The command that prints, on the target, the log of the server that was started last from its start on."""
        raise TargetError("this launcher runs load clients on this machine alone")

    def tools(self) -> str:
        """The archive of this package on the target, which programs run from there; put there where it is not."""
        raise TargetError("this launcher runs no programs of the package on the target")

    def start_client(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:  # noqa: ARG002
        """Start a load client on the target, which lives on without the link as long as the lease does."""
        raise TargetError(f"client {name}: this launcher runs load clients on this machine alone")

    def client_state(self, name: str) -> ServerState:
        """What a client that was started on the target is doing now."""
        raise TargetError(f"client {name}: this launcher runs load clients on this machine alone")

    def client_log(self, name: str) -> str:
        """What a client that was started on the target has written."""
        raise TargetError(f"client {name}: this launcher runs load clients on this machine alone")

    def stop_client(self, name: str) -> None:
        """End a client on the target, if it still runs."""
        raise TargetError(f"client {name}: this launcher runs load clients on this machine alone")

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

        Raises TargetError when the command cannot be started or does not end within `timeout_s`. Where the target is
        reached over a link that was lost, the command is run again once it is back.
        """

    @abstractmethod
    def open_stream(self, argv: Sequence[str], on_line: Callable[[str], None]) -> Stream:
        """Start a command on the target; `on_line` gets each line that it prints, in a thread of its own.

        Raises TargetError when it cannot be started.
        """

    def reach(self, report: Callable[[str], None]) -> None:  # noqa: B027
        """Wait until a target that was lost can be reached again. Raises TargetLost when it comes back too late."""

    def close(self) -> None:  # noqa: B027
        """Let go of the connections that the launcher has open, for good."""

    def watched_link(self) -> AbstractContextManager[Callable[[], LinkRecord]]:
        """Watch the link to the target; what the context gives says, when it is called, what became of it since.

        Of a target that needs none the record is empty.
        """
        return nullcontext(LinkRecord)

    def clock_offset_s(self) -> float:
        """The target's CLOCK_MONOTONIC less that of this machine, seconds."""
        return 0.0
