"""Slots: each host of any session on this machine has a number of its own, after which all it owns is named.

A slot is a file in /run that is locked as long as its session lives. So a session that was killed gives its slots back,
and the next one removes what lies there: processes, mounts, network and cgroups.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cgroups
from commands import LabFailed, call
from networks import Network, remove_fence
from processes import eventually

SLOTS = Path("/run/ddtree-bench-lab")
NUMBERS = range(1, 255)
NSPAWN_LEFT = ("/run/systemd/nspawn/propagate", "/run/systemd/nspawn/unix-export")


@dataclass
class Slot:
    """A number that this process holds, and the folder of its host."""

    number: int
    folder: Path
    descriptor: int

    @property
    def name(self) -> str:
        """The name of the host's network namespace, cgroups and mount."""
        return _name(self.number)

    @property
    def root(self) -> Path:
        """Where the host's root folder is mounted."""
        return self.folder / "root"

    def mount(self, lower: Path) -> None:
        """Mount the host's root folder: that of the lab, and over it what the host writes."""
        upper, work = self.folder / "upper", self.folder / "work"
        for folder in (upper, work, self.root):
            folder.mkdir()
        layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
        call("mount", "-t", "overlay", self.name, "-o", layers, str(self.root))

    def release(self) -> None:
        """Remove all that the slot's host had, and give the number back."""
        with _all_locked():
            _give_back(_path(self.number), self.descriptor)


def claim(parent: Path) -> Slot:
    """Take a free number and make a folder for its host below `parent`. Raises LabFailed when none is free."""
    with _all_locked():
        for number in NUMBERS:
            path = _path(number)
            if not path.exists():
                folder = parent / _name(number)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.write(descriptor, os.fsencode(folder))
                folder.mkdir(parents=True)
                return Slot(number, folder, descriptor)
    raise LabFailed(f"{SLOTS}: no number is free; hosts of {len(NUMBERS)} are running")


def remove_abandoned() -> None:
    """Remove what sessions that are no more have left on this machine."""
    with _all_locked():
        for path in SLOTS.glob("*.slot"):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            _give_back(path, descriptor)


def _give_back(path: Path, descriptor: int) -> None:
    number = int(path.stem)
    name = _name(number)
    folder = os.fsdecode(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    cgroups.kill(name)
    Network(number, name).remove()
    for left in NSPAWN_LEFT:
        with contextlib.suppress(FileNotFoundError):
            (Path(left) / name).rmdir()
    # Empty where a session was killed between two lines of `claim`.
    if folder:
        _remove_folder(Path(folder))
    cgroups.remove(name)
    path.unlink()
    os.close(descriptor)
    if not any(SLOTS.glob("*.slot")):
        remove_fence()


def _remove_folder(folder: Path) -> None:
    root = folder / "root"
    # The mount is busy until the kernel has taken down the namespaces of the processes that were killed.
    if not eventually(partial(_unmounted, root), 10):
        raise LabFailed(f"{root}: cannot be unmounted")
    if folder.exists():
        shutil.rmtree(folder)


def _unmounted(place: Path) -> bool:
    if place.is_mount():
        with contextlib.suppress(LabFailed):
            call("umount", str(place))
    return not place.is_mount()


def _name(number: int) -> str:
    return f"ddtree-lab-{number}"


def _path(number: int) -> Path:
    return SLOTS / f"{number}.slot"


@contextlib.contextmanager
def _all_locked() -> Iterator[None]:
    SLOTS.mkdir(mode=0o700, exist_ok=True)
    with (SLOTS / "slots.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
