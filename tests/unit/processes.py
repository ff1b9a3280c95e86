"""Waiting for processes, for tests that start and end them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 30.0
"""The bar: nothing is left 30 s after a kill -9."""


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(name: str) -> set[int]:
    """The process ids of what runs under this process by a name."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == name and alive(child.pid):
                found.add(child.pid)
    return found


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether a condition comes true within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end(pid: int) -> None:
    """Kill a process that may have ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class Owner:
    """owner.py as a process: its pid, and what it said about its server."""

    def __init__(self, folder: Path, *server_arguments: str, tie: bool = False, through_shell: bool = False) -> None:
        self.folder = folder
        script = str(Path(__file__).with_name("owner.py"))
        argv = [sys.executable, script, str(folder), str(folder / "server.log"), "tie" if tie else "free"]
        argv += server_arguments
        if through_shell:
            argv = ["bash", "-c", '"$@"; exit $?', "bash", *argv]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.server: dict[str, Any] = json.loads(line) if line else {}

    @property
    def pids(self) -> list[int]:
        """The watchdog's and the server's process ids."""
        return [self.server["watchdog_pid"], self.server["server_pid"]]

    def close(self) -> None:
        """End what the test has left."""
        for pid in (self.process.pid, *self.pids):
            end(pid)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
