"""Run one server as a child and end it when its owner is gone: the dead man's switch of a target.

A program of its own, standard library only, so that one file works on any host with a Python:

    python watchdog.py --lease FILE --token TOKEN --ttl 10 --grace 10 --state FILE [--lease-fd N] -- COMMAND...

The owner (the measuring process) renews the lease file; the watchdog reads it and stops the server once it has
not been renewed for the time to live, on SIGTERM, or when the server has ended by itself. Stopping ends every
descendant, those in process groups of their own included: the watchdog is their subreaper. If the watchdog is
killed, the kernel kills the server (PR_SET_PDEATHSIG). The locked lease descriptor passes through the watchdog
to the server, so the lock on the target is held until the last of them is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.5
NOT_STARTED = 127
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Call prctl(2); raises OSError when the kernel refuses."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def write_state(path: Path, **fields: Any) -> None:
    """Replace the state file in one step, so that a reader never sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(fields))
    partial.replace(path)


class LeaseReader:
    """Says for how long a lease has not been renewed, in seconds of CLOCK_MONOTONIC.

    A lease that is gone, unreadable or somebody else's counts as not renewed since it was last seen in order.
    """

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._token = token
        self._renewed_at = time.monotonic()

    def age(self) -> float:
        """Seconds since the owner last renewed the lease."""
        try:
            lease = json.loads(self._path.read_text())
        except (OSError, ValueError):
            lease = {}
        if lease.get("token") == self._token:
            self._renewed_at = float(lease["renewed_at"])
        return time.monotonic() - self._renewed_at


def descendants(root: int) -> list[int]:
    """Process ids of all living descendants of `root`; zombies are not living."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


class Supervisor:
    """One server and everything that descends from it."""

    def __init__(self, argv: list[str], state: Path, lease_fd: int | None) -> None:
        self._argv = argv
        self._state = state
        self._lease_fd = lease_fd
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server in a session and process group of its own; raises OSError when it cannot be started."""
        watchdog = os.getpid()

        def in_child() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != watchdog:
                os._exit(NOT_STARTED)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

        self._server = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=in_child,  # noqa: PLW1509 - this process has one thread
            pass_fds=() if self._lease_fd is None else (self._lease_fd,),
        )
        self.record("running")

    def record(self, phase: str, **more: Any) -> None:
        """Write the state file: phase running, stopping or ended, and the server's exit status once it has one."""
        server = self._server
        status = None if server is None else server.returncode
        write_state(
            self._state,
            phase=phase,
            watchdog_pid=os.getpid(),
            server_pid=None if server is None else server.pid,
            exit_code=status if status is not None and status >= 0 else None,
            signal=-status if status is not None and status < 0 else None,
            **more,
        )

    def reap(self) -> bool:
        """Collect ended descendants; True once the server itself has ended."""
        server = self._server
        assert server is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == server.pid:
                server.returncode = os.waitstatus_to_exitcode(status)
        return server.returncode is not None

    def end(self, grace_s: float) -> None:
        """SIGTERM to every descendant, SIGKILL after the grace; returns when none is left, however long it takes."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while descendants(os.getpid()):
            if time.monotonic() >= deadline:
                self._signal_all(signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.1)
            self.reap()
        self.reap()

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def say(text: str) -> None:
    """Write a line of the watchdog's own to the log, after what the server has written."""
    print(f"[watchdog] {text}", file=sys.stderr, flush=True)


def watch(supervisor: Supervisor, lease: LeaseReader, ttl_s: float) -> str:
    """Wait until there is a reason to stop; returns it: exited, requested or lease."""
    while True:
        received = signal.sigtimedwait(WATCHED, TICK_S)
        if supervisor.reap():
            return "exited"
        if received is not None and received.si_signo != signal.SIGCHLD:
            return "requested"
        age = lease.age()
        if age > ttl_s:
            say(f"the lease has not been renewed for {age:.1f} s: stopping the server")
            return "lease"


def main(arguments: list[str] | None = None) -> int:
    """Run the command under watch; returns 0 after any end that was seen through, 127 when it could not be started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lease", type=Path, required=True, help="lease file that the owner renews")
    parser.add_argument("--token", required=True, help="the owner's token in the lease file")
    parser.add_argument("--ttl", type=float, default=10.0, help="seconds without renewal after which the server stops")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--state", type=Path, required=True, help="file for the state of the server, JSON")
    parser.add_argument("--lease-fd", type=int, help="inherited descriptor that holds the lock on the lease")
    parser.add_argument("command", nargs="+", help="the server's command line, after --")
    options = parser.parse_args(arguments)

    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(options.command, options.state, options.lease_fd)
    try:
        supervisor.start()
    except (OSError, subprocess.SubprocessError) as error:
        say(f"cannot start {options.command[0]}: {error}")
        supervisor.record("ended", reason="not started")
        return NOT_STARTED
    reason = watch(supervisor, LeaseReader(options.lease, options.token), options.ttl)
    supervisor.record("stopping", reason=reason)
    supervisor.end(options.grace)
    supervisor.record("ended", reason=reason)
    return 0


if __name__ == "__main__":
    sys.exit(main())
