"""A snakemake process in its working folder: its name for the processes it starts, and a lock that ends with it.

Snakemake's own lock lists files and survives a kill, so the next start would be refused. Here every main process holds
a shared lock for as long as it lives: one that gets the lock alone knows that Snakemake's are left over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import uuid
from pathlib import Path
from typing import TextIO

import psutil

INVOCATION_VARIABLE = "DDTREE_BENCH_INVOCATION"
MAIN_PROCESS_VARIABLE = "DDTREE_BENCH_MAIN_PROCESS"


def invocation_id() -> str:
    """Name this pass over the plan once for all processes that it starts: cells of one pass and repeat form a block."""
    return os.environ.setdefault(INVOCATION_VARIABLE, uuid.uuid4().hex[:12])


def announce_main_process() -> None:
    """Tell the processes that this one starts whom they work for, so that they can end when it is gone."""
    process = psutil.Process()
    os.environ.setdefault(MAIN_PROCESS_VARIABLE, f"{socket.gethostname()} {process.pid} {process.create_time()}")


def main_process() -> psutil.Process | None:
    """Return the process that was announced; None when there is none or it runs on another host (a cluster's job).

    Raises psutil.NoSuchProcess when it ran here and is gone.
    """
    host, _, rest = os.environ.get(MAIN_PROCESS_VARIABLE, "").partition(" ")
    if host != socket.gethostname():
        return None
    pid, created = rest.split()
    process = psutil.Process(int(pid))
    if process.create_time() != float(created):
        raise psutil.NoSuchProcess(int(pid))
    return process


def drop_stale_locks(folder: Path) -> TextIO:
    """Remove Snakemake's locks of a working folder if no snakemake works there any more.

    Returns the file that holds this process's own lock; it is held until the file is closed or the process ends.
    """
    state = folder / ".snakemake"
    state.mkdir(parents=True, exist_ok=True)
    own = (state / "ddtree-bench.lock").open("w")
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        shutil.rmtree(state / "locks", ignore_errors=True)
    fcntl.flock(own, fcntl.LOCK_SH)
    return own
