"""One writer at a time below a folder that several hosts may share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddtree_bench.targets.launcher import Stream, TargetError

HOLD = 'mkdir -p -- "${1%/*}" && exec flock -- "$1" sh -c "echo held; exec cat"'
"""Holds a lock, from the moment that it says so, until its input ends: with the connection, if not before."""

REPORT_EVERY_S = 10.0


@contextmanager
def sole_writer(
    open_stream: Callable[[list[str], Callable[[str], None]], Stream], lock: str, report: Callable[[str], None]
) -> Iterator[None]:
    """Hold the lock file of an absolute path on a target within the block, after whoever holds it now.

    Raises TargetError when it cannot be held.
    """
    held = threading.Event()
    stream = open_stream(["sh", "-c", HOLD, "sh", lock], lambda _: held.set())
    try:
        while not held.wait(REPORT_EVERY_S):
            if stream.ended:
                raise TargetError(f"{lock}: cannot be locked: {stream.close().stderr.strip()[-300:]}")
            report(f"{lock}: waiting for somebody else, who writes there")
        yield
    finally:
        stream.close()
