"""Processes of this machine as /proc shows them: by a mark in the environment, by port. Standard library only.

A user other than root sees those of others only in part: neither their environment nor what they have open.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")

LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


def marked(variable: str, value: str) -> list[str]:
    """The living processes that were started with `variable` set to `value`, in words; for root those of all users."""
    mark, found = f"{variable}={value}".encode(), []
    for process in PROC.glob("[0-9]*"):
        # It may end, or belong to somebody else.
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(_words(process))
    return found


def port_holder(number: int) -> str:
    """The process that listens on a port, in words."""
    sockets = {f"socket:[{inode}]" for inode in _listening(number)}
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):
            if any(_target(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                return _words(process)
    return "a process that this user cannot see"


def _words(process: Path) -> str:
    command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return f"process {process.name} ({' '.join(command[:6]).strip()})"


def _target(descriptor: Path) -> str | None:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return None


def _listening(number: int) -> list[str]:
    """Inodes of the sockets that listen on a port, IPv4 and IPv6."""
    found = []
    for table in (PROC / "net/tcp", PROC / "net/tcp6"):
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == number:
                    found.append(columns[9])
    return found
