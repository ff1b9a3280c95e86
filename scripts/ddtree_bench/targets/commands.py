"""Commands of this machine, run to their end with their output shown as it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddtree_bench.targets.launcher import CommandResult, TargetError

READ_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 10.0
TAIL_LINES = 200


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: str = "",
    report: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a command of this machine to its end; `report` gets each line of stdout and stderr as it comes.

    Raises TargetError when it cannot be started or does not end within `timeout_s` seconds; it is then killed.
    """
    process = _started(argv, env)
    collected: dict[str, deque[str]] = {"stdout": deque(), "stderr": deque()}
    readers = [
        threading.Thread(target=_collect, args=(stream, collected[name], report), daemon=True)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
    ]
    try:
        for reader in readers:
            reader.start()
        _feed(process, stdin)
        process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"{' '.join(argv[:4])} … did not end within {timeout_s:.0f} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for reader in readers:
        reader.join(READ_TIMEOUT_S)
    return _result(process.returncode, "".join(collected["stdout"]), "".join(collected["stderr"]))


class LocalStream:
    """A command of this machine that goes on while `on_line` gets each line of its stdout, in a thread of its own."""

    def __init__(
        self, argv: Sequence[str], on_line: Callable[[str], None], env: Mapping[str, str] | None = None
    ) -> None:
        self._process = _started(argv, env)
        # What a command writes in hours is much: nothing is kept of stdout.
        self._stderr: deque[str] = deque(maxlen=TAIL_LINES)
        self._readers = [
            threading.Thread(target=_collect, args=(self._process.stdout, deque(maxlen=0), on_line), daemon=True),
            threading.Thread(target=_collect, args=(self._process.stderr, self._stderr, None), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def ended(self) -> bool:
        """True once the command is gone."""
        return self._process.poll() is not None

    def send(self, line: str) -> None:
        """Write a line to the command's input. Raises TargetError when it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise TargetError(f"a command of this machine has ended: {''.join(self._stderr).strip()[-500:]}") from error

    def close(self) -> CommandResult:
        """Close the command's input and wait for its end; one that does not end within 10 s is killed.

        The result has the end of stderr, and nothing of stdout.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for reader in self._readers:
            reader.join(READ_TIMEOUT_S)
        return _result(self._process.returncode, "", "".join(self._stderr))


def _started(argv: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise TargetError(f"cannot run {argv[0]}: {error.strerror}") from error


def _result(returncode: int, stdout: str, stderr: str) -> CommandResult:
    if returncode >= 0:
        return CommandResult(returncode, stdout, stderr)
    return CommandResult(-1, stdout, stderr, signal.Signals(-returncode).name.removeprefix("SIG"))


def _feed(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    try:
        with process.stdin:
            process.stdin.write(text)
    except BrokenPipeError:
        # The command ended, or closed its input, before it had read all; its exit status says whether that matters.
        return


def _collect(stream: Any, lines: deque[str], report: Callable[[str], None] | None) -> None:
    for line in stream:
        lines.append(line)
        if report is not None:
            report(line.rstrip("\n"))
