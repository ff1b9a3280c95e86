"""A command on a host that goes on while its lines are taken."""

from __future__ import annotations

from collections.abc import Callable

from ddtree_bench.targets.launcher import CommandResult
from ddtree_bench.targets.ssh.command import Command
from ddtree_bench.targets.ssh.failures import LinkLost

SEND_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 10.0


class CommandStream:
    """A launcher's Stream over one channel. It ends with the link, and is not opened again."""

    def __init__(self, command: Command, kill: Callable[[], None]) -> None:
        self._command = command
        self._kill = kill

    @property
    def ended(self) -> bool:
        """True once the command, or the link to it, is gone."""
        return self._command.ended

    def send(self, line: str) -> None:
        """Write a line to the command's input. Raises LinkLost when the command or the link is gone."""
        try:
            self._command.send(f"{line}\n", SEND_TIMEOUT_S)
        except (OSError, EOFError) as error:
            raise LinkLost(f"a command on the host is gone, or the link to it: {error}") from None

    def close(self) -> CommandResult:
        """Close the command's input and wait for its end; one that does not end within 10 s is killed.

        The result has the end of stderr, and nothing of stdout. Where the link is gone the exit code is -1, with no
        signal, and the command ends when it next reads or writes.
        """
        self._command.close_input()
        if not self._command.wait(CLOSE_TIMEOUT_S):
            self._kill()
            self._command.wait(CLOSE_TIMEOUT_S)
        try:
            return self._command.result()
        except LinkLost:
            return CommandResult(-1, *self._command.output())
        finally:
            self._command.close()
