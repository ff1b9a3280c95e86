"""Commands of this machine that the lab needs, with what they said when they fail."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence


class LabFailed(Exception):
    """The lab could not do what was asked; the message holds what the command said."""


def call(*argv: str, timeout_s: float = 60.0, pass_fds: Sequence[int] = ()) -> str:
    """Run a command to its end and return what it printed; `pass_fds` are descriptors of this process that it keeps.

    Raises LabFailed when it does not end with 0, or not within the time.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            pass_fds=pass_fds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabFailed(f"{shlex.join(argv)}: not done after {timeout_s:g} s") from None
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise LabFailed(f"{shlex.join(argv)}: exit status {done.returncode}: {said}")
    return done.stdout
