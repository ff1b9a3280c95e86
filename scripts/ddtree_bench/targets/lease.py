"""The lease on a target: one run at a time on a machine, held for as long as its server may live.

Two things make a lease. The lock (flock) on the lease file says whether the target is taken: it is inherited by
the watchdog and the server, so it is held until the last of the three is gone, and a crash or a reboot leaves
nothing to clean up. The file's content says who holds it and when the owner last renewed it; the watchdog stops
a server whose owner no longer does.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from ddtree_bench.targets.launcher import TargetError

DEFAULT_DIRECTORY = Path("/var/tmp/ddtree-bench")
"""Shared by all users of the machine, so that their runs see each other."""

RENEW_EVERY_S = 2.0
TTL_S = 10.0
POLL_S = 0.5
REPORT_EVERY_S = 30.0


class TargetBusy(TargetError):
    """Somebody else's run holds the lease."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lease: user, host, process, run, and since when (ISO 8601, UTC)."""

    user: str
    host: str
    pid: int
    run: str
    since: str

    @classmethod
    def this_process(cls, run: str) -> Owner:
        """The owner that this process is, for the run named `run`."""
        return cls(getpass.getuser(), socket.gethostname(), os.getpid(), run, _now())

    def __str__(self) -> str:
        return f"{self.user} (host {self.host}, process {self.pid}, run {self.run}) since {self.since}"


class Lease:
    """A lease that is held and renewed by a thread of this process until `release`, or until the block ends."""

    def __init__(self, path: Path, descriptor: int, owner: Owner, renew_every_s: float = RENEW_EVERY_S) -> None:
        self.path = path
        self.descriptor = descriptor
        self.owner = owner
        self.token = uuid.uuid4().hex
        self._renew_every_s = renew_every_s
        self._ended = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        self._thread.start()

    @property
    def released(self) -> bool:
        """True once the lease has been let go of."""
        return self._ended.is_set()

    def release(self) -> None:
        """Stop renewing and let go of the lock; a watchdog that inherited it keeps it until its server is gone."""
        if self.released:
            return
        self._ended.set()
        self._thread.join()
        # Closing, not unlocking: LOCK_UN would take the lock away from the watchdog and the server too.
        os.close(self.descriptor)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep_renewing(self) -> None:
        while not self._ended.wait(self._renew_every_s):
            self._renew()

    def _renew(self) -> None:
        # In place, not by rename: the lock belongs to this very file.
        content = {**asdict(self.owner), "token": self.token, "renewed_at": time.monotonic(), "renewed": _now()}
        os.pwrite(self.descriptor, _padded(json.dumps(content)), 0)


def acquire(
    name: str,
    directory: Path = DEFAULT_DIRECTORY,
    *,
    run: str,
    wait_s: float = 0.0,
    report: Callable[[str], None] = print,
) -> Lease:
    """Take the lease `name`, waiting up to `wait_s` seconds and reporting who holds it meanwhile.

    Raises TargetBusy, which names the owner, when the lease is still held after `wait_s`, and TargetError when
    the lease directory cannot be used.
    """
    path = path_of(name, directory)
    _make_directory(directory)
    deadline = time.monotonic() + wait_s
    next_report = 0.0
    while True:
        descriptor = _try_lock(path)
        if descriptor is not None:
            return Lease(path, descriptor, Owner.this_process(run))
        now = time.monotonic()
        if now >= deadline:
            raise TargetBusy(
                f"the lease {path} is held by {describe_holder(path)}; "
                "wait for that run to end, or raise targets.<name>.lease_wait_s"
            )
        if now >= next_report:
            report(f"waiting for the lease {path}, held by {describe_holder(path)}")
            next_report = now + REPORT_EVERY_S
        time.sleep(min(POLL_S, max(0.0, deadline - now)))


def path_of(name: str, directory: Path) -> Path:
    """The absolute path of a lease's file."""
    return (directory / f"{name}.lease").absolute()


def read(path: Path) -> dict[str, Any] | None:
    """The content of a lease file; None when there is none or it says nothing. It does not say that it is held."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def describe_holder(path: Path) -> str:
    """Who holds the lease in words, and whether that owner still renews it."""
    content = read(path)
    if content is None:
        return "an owner that has not signed it"
    owner = Owner(*(content.get(name, "unknown") for name in Owner.__dataclass_fields__))
    age = time.monotonic() - content.get("renewed_at", time.monotonic())
    return f"{owner}, who no longer renews it: the server is being stopped" if age > TTL_S else str(owner)


def _try_lock(path: Path) -> int | None:
    """Open and lock the lease file; None when somebody else has the lock."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same_file(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_same_file(descriptor: int, path: Path) -> bool:
    """False when the file was removed or replaced between opening and locking."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    # A file of another user in a sticky folder must be opened without O_CREAT (fs.protected_regular).
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TargetError(f"cannot open the lease file {path}: {error.strerror}; remove it") from error
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        except OSError as error:
            raise TargetError(f"cannot create the lease file {path}: {error.strerror}") from error
        os.fchmod(descriptor, 0o666)
        return descriptor


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise TargetError(f"cannot make the lease directory {directory}: {error.strerror}") from error
    else:
        directory.chmod(0o1777)
    if not stat.S_ISDIR(directory.stat().st_mode):
        raise TargetError(f"the lease directory {directory} is not a folder")


def _padded(text: str) -> bytes:
    """`text` with blanks up to a fixed length, so that a renewal never leaves the end of an older one behind."""
    return text.encode().ljust(1024) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
