"""What the client does to its own process while it measures, and what the machine did to it."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_SWITCH_S = 0.0005
_SPARE_FILES = 64


@dataclass(frozen=True)
class Scheduling:
    """What the scheduler did to one thread: seconds on a CPU, seconds ready without one, and time slices."""

    cpu_s: float
    wait_s: float
    slices: int

    def __sub__(self, earlier: Scheduling) -> Scheduling:
        return Scheduling(self.cpu_s - earlier.cpu_s, self.wait_s - earlier.wait_s, self.slices - earlier.slices)


def scheduling() -> Scheduling | None:
    """Return the calling thread's record since it began; None without Linux's schedstat."""
    try:
        cpu, wait, slices = (int(field) for field in _SCHEDSTAT.read_text().split())
    except (OSError, ValueError):
        return None
    return Scheduling(cpu / 1e9, wait / 1e9, slices)


def allow_connections(users: int) -> None:
    """Let the process have as many open files as the connections of `users` take.

    Raises ValueError when the system does not allow that; the message names the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = users + len(list(Path("/proc/self/fd").iterdir())) + _SPARE_FILES
    if needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"concurrency: {users} connections need {needed} open files, and the system allows {hard}; "
            "raise its limit (ulimit -Hn) or lower the concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep Python from adding to latencies: no garbage collection, and quick hand-over of the interpreter's lock.

    A full collection of a process that has pandas loaded stops all threads for tens of milliseconds; a thread that
    computes keeps the lock for 5 ms by default.
    """
    collecting, interval = gc.isenabled(), sys.getswitchinterval()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collecting:
            gc.enable()
