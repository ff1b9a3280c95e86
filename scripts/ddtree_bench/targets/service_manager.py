"""What programs on a host tell systemd (sd_notify) and ask of it (systemctl). Standard library only."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.unit_state import SHOW, UnitState, parse_shown

OURS = "ddtree-bench-*.service"
"""Pattern of the units of this package: servers, clients and lease keepers."""

TIMEOUT_S = 5.0


def notify(**values: str) -> None:
    """Tell systemd of this process's unit, such as READY="1" or STATUS="…"; nothing where no systemd asked for it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        # An abstract socket: it has a name without a file.
        address = "\0" + address[1:]
    # A line break would begin another value.
    message = "\n".join(f"{name}={' '.join(value.splitlines())}" for name, value in values.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel, suppress(OSError):
        channel.sendto(message.encode(errors="replace"), address)


def systemctl(scope: str, *arguments: str) -> str:
    """What systemctl prints; `scope` is system or user.

    Raises TargetError when it fails or does not answer within TIMEOUT_S.
    """
    # A login that PAM has not seen has no XDG_RUNTIME_DIR, though its user manager may run.
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
    argv = ["systemctl", f"--{scope}", "--no-pager", *arguments]
    try:
        result = subprocess.run(
            argv, env=environment, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TargetError(f"{' '.join(argv)}: {error}") from error
    if result.returncode != 0:
        raise TargetError(f"{' '.join(argv)}: {result.stderr.strip() or f'exit status {result.returncode}'}")
    return result.stdout


def loaded_units(scope: str) -> list[UnitState]:
    """The units of this package that the service manager has loaded. Raises TargetError when it does not answer."""
    return parse_shown(systemctl(scope, *SHOW, OURS))
