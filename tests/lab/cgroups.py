"""Cgroups of one host: a child of our own in every hierarchy, in which the host's systemd is the master."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from commands import LabFailed
from processes import eventually

MOUNTED = Path("/sys/fs/cgroup")
UNIFIED = MOUNTED / "unified"
HIERARCHIES = ("systemd", "unified", "memory", "pids", "cpu", "cpuacct", "blkio")
"""The hybrid layout: systemd's own hierarchy, cgroup v2 without controllers, and the controllers of v1."""

ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"'
"""Shell: run what stands after `--` in the cgroups whose folders stand before it."""


def create(name: str) -> list[Path]:
    """Make the cgroup `name` below the one that this process is in, in every hierarchy, and return their folders."""
    folders = [MOUNTED / hierarchy / _own(hierarchy).strip("/") / name for hierarchy in HIERARCHIES]
    for folder in folders:
        folder.mkdir()
    return folders


def entered(folders: Sequence[Path], argv: Sequence[str]) -> list[str]:
    """Return the command line that runs `argv` in these cgroups."""
    return ["sh", "-ec", ENTER, "sh", *map(str, folders), "--", *argv]


def find(name: str) -> list[Path]:
    """The folders of the cgroup `name`, wherever another process may have made it."""
    return [folder for hierarchy in HIERARCHIES for folder in (MOUNTED / hierarchy).glob(f"**/{name}")]


def kill(name: str) -> None:
    """Kill every process of the cgroup and of those below it at once, and wait until they are gone."""
    for folder in find(name):
        if folder.is_relative_to(UNIFIED):
            (folder / "cgroup.kill").write_text("1")
            if not eventually(partial(_empty, folder), 10):
                raise LabFailed(f"{folder}: its processes were killed and are still there after 10 s")


def remove(name: str) -> None:
    """Remove the cgroup, whose processes have ended, with those below it. Raises LabFailed when it cannot be."""
    if not eventually(lambda: not _left(name), 5):
        raise LabFailed(f"cgroups that cannot be removed: {', '.join(map(str, find(name)))}")


def _left(name: str) -> list[Path]:
    for folder in find(name):
        # The host's own systemd may still be removing some.
        with contextlib.suppress(FileNotFoundError):
            for below in sorted(folder.glob("**/"), reverse=True):
                with contextlib.suppress(OSError):
                    below.rmdir()
    return find(name)


def _empty(folder: Path) -> bool:
    return "populated 0" in (folder / "cgroup.events").read_text()


def _own(hierarchy: str) -> str:
    """The path of this process's cgroup in a hierarchy."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if hierarchy in names.removeprefix("name=").split(",") or (hierarchy == "unified" and number == "0"):
            return path
    raise LabFailed(f"/proc/self/cgroup names no hierarchy {hierarchy}")
