"""The one connection to a host, over which commands and copies go; it is found again when it is lost."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import paramiko

from ddtree_bench.targets.launcher import CommandResult, TargetError
from ddtree_bench.targets.ssh.command import Command, is_up, opened
from ddtree_bench.targets.ssh.command_line import MARK, end_marked, render
from ddtree_bench.targets.ssh.destination import Destination
from ddtree_bench.targets.ssh.failures import HostUnreachable, LinkLost, LoginRefused
from ddtree_bench.targets.ssh.link import Link, open_link
from ddtree_bench.targets.ssh.stream import CommandStream

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
LEAST_CONNECT_S = 1.0
KILL_TIMEOUT_S = 10.0
ATTEMPTS = 10
"""How often a command is begun whose link is cut again and again, by the command itself perhaps."""

T = TypeVar("T")


class Connection:
    """Connects at first use, and again, within `reconnect_s` seconds, whenever the link was lost. For any thread.

    `bytes_copied` counts what copies have put over the link, both ways.
    """

    def __init__(self, destination: Destination, *, reconnect_s: float, report: Callable[[str], None]) -> None:
        self.destination = destination
        self.bytes_copied = 0
        self._reconnect_s = reconnect_s
        self._report = report
        self._link: Link | None = None
        self._lost_at: float | None = None
        self._give_up_at = math.inf
        self._connecting = threading.Lock()
        self._closed = threading.Event()

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str = "",
        report: Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command to its end; `report` gets each line of stdout and stderr as it comes.

        Every argument arrives exactly, whichever shell the login has; `env` is added to the login's environment. When
        the link is lost, what is left of the command on the host is killed and it is run again from its beginning.

        Raises TargetError when it does not end within `timeout_s` seconds: it is then killed on the host, with all
        that it has started under this user (not what it runs through sudo, or as a unit). Raises LinkLost when the
        link does not come back, and ConnectionFailed when there was none yet.
        """
        mark = uuid.uuid4().hex
        line = render(argv, {**(env or {}), MARK: mark})
        begun: list[Link] = []

        def attempt(link: Link) -> CommandResult:
            if begun:
                self._kill(link, mark, argv)
            begun.append(link)
            command = Command(link, line, report, report)
            try:
                return self._to_its_end(command, argv, stdin, timeout_s)
            except LinkLost:
                raise
            except BaseException:
                self._kill(link, mark, argv)
                raise
            finally:
                command.close()

        return self.repeated(attempt)

    def stream(self, argv: Sequence[str], on_line: Callable[[str], None]) -> CommandStream:
        """Start a command whose lines on stdout `on_line` gets, in a thread of its own, until the stream is closed.

        Raises TargetError when it cannot be started. Once the link is lost it has ended: it is not started again.
        """
        mark = uuid.uuid4().hex
        link = self._present()
        command = Command(link, render(argv, {MARK: mark}), on_line, endless=True)
        return CommandStream(command, lambda: self._kill(link, mark, argv))

    @contextmanager
    def sftp(self) -> Iterator[paramiko.SFTPClient]:
        """Copy files within the block. Raises LinkLost when the link is lost meanwhile, OSError for files."""
        link = self._present()
        channel, client = opened(link), None
        try:
            channel.invoke_subsystem("sftp")
            client = paramiko.SFTPClient(channel)
            yield client
        except (paramiko.SSHException, OSError, EOFError) as error:
            if client is not None and isinstance(error, OSError) and is_up(link):
                raise
            if client is None and is_up(link):
                raise TargetError(
                    f"{self.destination.name}: the host offers no SFTP ({error}); its sshd_config needs "
                    "`Subsystem sftp internal-sftp`"
                ) from None
            raise LinkLost(f"the link was cut: {error}") from None
        finally:
            with suppress(paramiko.SSHException, OSError, EOFError):
                channel.close()

    def repeated(self, work: Callable[[Link], T]) -> T:
        """Do work that may be done again, from its beginning each time that the link is lost on the way."""
        attempts, copied = 0, self.bytes_copied
        while True:
            link = self._present()
            try:
                return work(link)
            except LinkLost as error:
                # What copies something gets on from one attempt to the next.
                attempts, copied = (attempts + 1 if copied == self.bytes_copied else 1), self.bytes_copied
                if attempts >= ATTEMPTS or self._reconnect_s <= 0:
                    raise LinkLost(f"{self.destination.name}: {error}") from None

    def count_copied(self, count: int) -> None:
        """Count bytes of a copy that went over the link: a copy that gets on may be begun again as often as need be."""
        self.bytes_copied += count

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Look for a lost link for `seconds` at most within the block, whichever thread needs it."""
        before = self._give_up_at
        self._give_up_at = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._give_up_at = before

    def close(self) -> None:
        """Disconnect, for good; a thread that waits for the link to come back gives up."""
        self._closed.set()
        if self._link is not None:
            self._link.close()

    def _to_its_end(self, command: Command, argv: Sequence[str], stdin: str, timeout_s: float) -> CommandResult:
        deadline = time.monotonic() + timeout_s
        # The command may end, or close its input, before it has read all; its exit status says whether that matters.
        with suppress(OSError, EOFError):
            command.send(stdin, timeout_s)
        command.close_input()
        if not command.wait(deadline - time.monotonic()):
            raise TargetError(
                f"{self.destination.name}: {' '.join(argv[:4])} … did not end within {timeout_s:.0f} s and was killed"
            )
        return command.result()

    def _kill(self, link: Link, mark: str, argv: Sequence[str]) -> None:
        """Kill what runs of a command on the host; without a link it lives on until it notices."""
        try:
            command = Command(link, render(end_marked(mark), {}))
            ended = command.wait(KILL_TIMEOUT_S)
            command.close()
            why = f"that took longer than {KILL_TIMEOUT_S:.0f} s"
        except LinkLost:
            return
        except TargetError as error:
            ended, why = False, str(error)
        if not ended:
            self._report(f"`{' '.join(argv[:4])} …` may still run on the host; it could not be killed: {why}")

    def _present(self) -> Link:
        """The link, connected when there was none and found again when it is lost."""
        patience_s = max(0.0, self._give_up_at - time.monotonic())
        if not self._connecting.acquire(timeout=min(patience_s, threading.TIMEOUT_MAX)):
            raise LinkLost(f"{self.destination.name}: the link was lost and not found again yet")
        try:
            self._require_open()
            if self._link is None:
                self._link = open_link(self.destination, self._connect_s())
            elif not self._link.is_active():
                self._link = self._found_again()
            self._lost_at = None
            if self._closed.is_set():
                # Whoever closed the connection meanwhile saw the link before.
                self._link.close()
            self._require_open()
            return self._link
        finally:
            self._connecting.release()

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise TargetError(f"{self.destination.name}: the connection was closed")

    def _connect_s(self) -> float:
        return min(self.destination.connect_timeout_s, max(LEAST_CONNECT_S, self._give_up_at - time.monotonic()))

    def _found_again(self) -> Link:
        """Try until the host answers; once in any case, and for as long as is left since the link was first missed."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        delay = FIRST_DELAY_S
        while True:
            left = self._left_s(self._lost_at)
            if left > 0:
                self._report(f"link lost; trying again for {left:.0f} s more")
            try:
                link = open_link(self.destination, self._connect_s())
            except (HostUnreachable, LoginRefused) as error:
                # A host that boots refuses logins for a while.
                left = self._left_s(self._lost_at)
                if left <= 0 or self._closed.wait(min(delay * random.uniform(0.75, 1.25), left)):
                    raise LinkLost(
                        f"{self.destination.name}: the link was lost and not found again within "
                        f"{time.monotonic() - self._lost_at:.0f} s: {error}"
                    ) from None
                delay = min(2 * delay, LONGEST_DELAY_S)
                continue
            self._report(f"link found again after {time.monotonic() - self._lost_at:.0f} s")
            return link

    def _left_s(self, lost_at: float) -> float:
        """How long a link that was lost at a moment is still to be looked for."""
        return min(lost_at + self._reconnect_s, self._give_up_at) - time.monotonic()
