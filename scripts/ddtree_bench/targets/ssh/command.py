"""One command on a host, over a channel of its own: its input, its output as it comes, and how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import paramiko

from ddtree_bench.targets.launcher import CommandResult, TargetError
from ddtree_bench.targets.ssh.failures import LinkLost
from ddtree_bench.targets.ssh.link import Link

READ_BYTES = 1 << 16
OPEN_TIMEOUT_S = 15.0
LAST_OUTPUT_S = 10.0
"""How long the output may stay open once the command itself has ended."""

SETTLE_S = 0.5
"""How long a channel of a link that was cut may be closed before the link itself is."""

SILENT_S = 60.0
"""How long a command that reads a file may give nothing."""

TAIL_BYTES = 1 << 16


class Command:
    """A command that runs; `on_stdout` and `on_stderr` get its lines, each in a thread of its own.

    Of one that is `endless` the end of stderr alone is kept, since what it writes in hours is much.

    Raises LinkLost when the link is gone, TargetError when the host runs no commands for this login.
    """

    def __init__(
        self,
        link: Link,
        line: str,
        on_stdout: Callable[[str], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        *,
        endless: bool = False,
    ) -> None:
        self._link = link
        self._channel = opened(link)
        try:
            self._channel.exec_command(line)
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.close()
            if not is_up(link):
                raise LinkLost(f"the link was cut: {error}") from None
            raise TargetError(f"the host runs no command for this login: {error}") from None
        self._stdout = _Output(self._channel.recv, on_stdout, 0 if endless else None)
        self._stderr = _Output(self._channel.recv_stderr, on_stderr, TAIL_BYTES if endless else None)

    @property
    def ended(self) -> bool:
        """True once the command, or the link, is gone."""
        return self._channel.status_event.is_set()

    def send(self, text: str, timeout_s: float) -> None:
        """Write to the command's input.

        Raises OSError when that is closed, TimeoutError when nobody reads it, LinkLost when nothing can be sent.
        """
        self._channel.settimeout(timeout_s)
        try:
            self._channel.sendall(text.encode())
        except paramiko.SSHException as error:
            # New keys were to be agreed upon, and the host did not do its part.
            self._link.close()
            raise LinkLost(f"the link was cut: {error}") from None

    def close_input(self) -> None:
        """Let the command see the end of its input."""
        with suppress(paramiko.SSHException, OSError, EOFError):
            self._channel.shutdown_write()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False when it did not come within `timeout_s` seconds."""
        return self._channel.status_event.wait(max(0.0, timeout_s))

    def result(self) -> CommandResult:
        """How the command ended. Raises LinkLost when nobody knows, since the link went first."""
        stdout, stderr = self.output()
        signal = self._link.signals.get(self._channel.chanid)
        if signal is not None:
            return CommandResult(-1, stdout, stderr, signal)
        if self._channel.exit_status < 0:
            raise LinkLost("the link was cut before the command ended")
        return CommandResult(self._channel.exit_status, stdout, stderr)

    def output(self) -> tuple[str, str]:
        """What the command, which has ended, wrote to stdout and stderr."""
        deadline = time.monotonic() + LAST_OUTPUT_S
        return self._stdout.text(deadline), self._stderr.text(deadline)

    def close(self) -> None:
        """Let go of the channel. A command that still runs is not ended by that."""
        with suppress(paramiko.SSHException, OSError, EOFError):
            self._channel.close()


def read_blocks(link: Link, line: str) -> Iterator[bytes]:
    """Yield what a command that reads a file writes to stdout, as it comes.

    Raises TargetError, with what it says on stderr, when it fails or gives nothing for SILENT_S seconds, LinkLost when
    the link is gone.
    """
    channel = opened(link)
    with channel:
        try:
            channel.settimeout(SILENT_S)
            channel.exec_command(line)
            while block := channel.recv(READ_BYTES):
                yield block
            said = channel.recv_stderr(READ_BYTES).decode(errors="replace").strip()
            if not channel.status_event.wait(SILENT_S):
                raise TimeoutError
            status = channel.exit_status
        except TimeoutError:
            raise TargetError(
                f"a file of the host cannot be read: nothing came of it for {SILENT_S:.0f} s; see that its disk answers"
            ) from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise LinkLost(f"the link was cut: {error}") from None
    if status < 0:
        raise LinkLost("the link was cut")
    if status > 0:
        raise TargetError(f"a file of the host cannot be read: {said}")


def is_up(link: Link) -> bool:
    """Whether a link, one of whose channels has failed, is up all the same."""
    link.join(SETTLE_S)
    return link.is_active()


class _Output:
    """A thread that reads one of a command's outputs to its end, and keeps its last `keep` bytes, or all."""

    def __init__(
        self, receive: Callable[[int], bytes], on_line: Callable[[str], None] | None, keep: int | None
    ) -> None:
        self._receive = receive
        self._on_line = on_line
        self._keep = keep
        self._kept = bytearray()
        self._begun: list[bytes] = []
        self._thread = threading.Thread(target=self._read, name="ssh output", daemon=True)
        self._thread.start()

    def text(self, deadline: float) -> str:
        """What is kept of all that was read by the end, or by a moment of time.monotonic()."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._kept.decode(errors="replace")

    def _read(self) -> None:
        while True:
            try:
                chunk = self._receive(READ_BYTES)
            except TimeoutError:
                # The channel's time limit is meant for what is sent.
                continue
            except (paramiko.SSHException, OSError, EOFError):
                break
            if not chunk:
                break
            self._kept += chunk
            if self._keep is not None:
                del self._kept[: max(0, len(self._kept) - self._keep)]
            if self._on_line is not None:
                self._split(chunk, self._on_line)
        if self._on_line is not None and self._begun:
            self._on_line(b"".join(self._begun).decode(errors="replace"))

    def _split(self, chunk: bytes, on_line: Callable[[str], None]) -> None:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            on_line(b"".join((*self._begun, line)).decode(errors="replace"))
            self._begun = []
        if rest:
            self._begun.append(rest)


def opened(link: Link) -> paramiko.Channel:
    """Return a new channel. Raises LinkLost, and TargetError when the host opens no more."""
    try:
        return link.open_session(timeout=OPEN_TIMEOUT_S)
    except paramiko.ChannelException as error:
        raise TargetError(
            f"the host opens no further session on this connection ({error.text}); its sshd_config must allow "
            "MaxSessions 10, the default, and end what is left over there"
        ) from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        link.close()
        raise LinkLost(f"the link was cut: {error}") from None
