"""Commands of this machine, run to their end with their output shown as it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddtree_bench.targets.launcher import CommandResult, TargetError

READ_TIMEOUT_S = 10.0


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
    try:
        process = subprocess.Popen(
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
    collected: dict[str, list[str]] = {"stdout": [], "stderr": []}
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
    return CommandResult(process.returncode, "".join(collected["stdout"]), "".join(collected["stderr"]))


def _feed(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    try:
        with process.stdin:
            process.stdin.write(text)
    except BrokenPipeError:
        # The command ended, or closed its input, before it had read all; its exit status says whether that matters.
        return


def _collect(stream: Any, lines: list[str], report: Callable[[str], None] | None) -> None:
    for line in stream:
        lines.append(line)
        if report is not None:
            report(line.rstrip("\n"))
