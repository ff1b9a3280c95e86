"""The lease on a target: one run at a time on a machine, held for as long as its server may live.

Two things make a lease. The lock (flock) on the lease file says whether the target is taken: it is inherited by
the watchdog and the server, so it is held until the last of the three is gone, and a crash or a reboot leaves
nothing to clean up. The file's content says who holds it and when the owner last renewed it; the watchdog stops
a server whose owner no longer does. On a host that is measured from elsewhere the lease keeper holds the lock.

Times are of the machine's CLOCK_MONOTONIC: nobody sets it, and it stands still while the machine is suspended, when
no server runs either. (CLOCK_BOOTTIME goes on, so that every lease would be over when the machine wakes up, before
its owner can renew it.) Standard library only: it runs on hosts too.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
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

LOOK_S = 0.05
"""Longer than `is_held` keeps a lock that it tries."""

SIZE = 8192
"""Bytes of a signature: room for the longest path of a workflow."""

LEASE_MARK = "DDTREE_BENCH_LEASE"
"""Environment variable with the lease that a server was started under."""

START_MARK = "DDTREE_BENCH_START"
"""Environment variable by which every process of one start is known, whatever became of its parents."""


class TargetBusy(TargetError):
    """Somebody else's run holds the lease."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lease: user, host, process, run, since when (ISO 8601, UTC), and the folder of the workflow."""

    user: str
    host: str
    pid: int
    run: str
    since: str
    workflow: str = ""

    @classmethod
    def this_process(cls, run: str) -> Owner:
        """The owner that this process is, for the run named `run` of the workflow in the working directory."""
        folder = os.fsencode(Path.cwd()).decode(errors="replace")
        return cls(getpass.getuser(), socket.gethostname(), os.getpid(), run, _now(), folder)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Owner:
        """The owner whom a lease file names; of one that an older release wrote no workflow is known."""
        unsaid = {field.name: "unknown" for field in fields(cls)} | {"workflow": ""}
        return cls(**{name: content.get(name, value) for name, value in unsaid.items()})

    def __str__(self) -> str:
        workflow = f", workflow {self.workflow}" if self.workflow else ""
        words = f"{self.user} (host {self.host}, process {self.pid}, run {self.run}{workflow}) since {self.since}"
        # Anybody may have written the file that they come from, and they are shown on terminals.
        return printable(words)


class Lease:
    """A lease that is held and renewed by a thread of this process until `release`, or until the block ends."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        owner: Owner,
        renew_every_s: float = RENEW_EVERY_S,
        ttl_s: float = TTL_S,
    ) -> None:
        self.path = path
        self.descriptor = descriptor
        self.owner = owner
        self.ttl_s = ttl_s
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
        sign(self.descriptor, self.owner, self.token, self.ttl_s, time.monotonic())


def acquire(
    name: str,
    directory: Path = DEFAULT_DIRECTORY,
    *,
    run: str,
    wait_s: float = 0.0,
    report: Callable[[str], None] = print,
    ttl_s: float = TTL_S,
    shared: bool = False,
) -> Lease:
    """Take the lease `name` and renew it until it is released; `ttl_s` is how long it is good for without.

    Waits and raises as `take`.
    """
    path = path_of(name, directory)
    descriptor = take(path, wait_s=wait_s, report=report, shared=shared)
    return Lease(path, descriptor, Owner.this_process(run), ttl_s=ttl_s)


def take(path: Path, *, wait_s: float = 0.0, report: Callable[[str], None] = print, shared: bool = False) -> int:
    """Lock a lease file, waiting up to `wait_s` seconds and reporting who holds it meanwhile.

    Returns the descriptor that holds the lock, for `sign`. A `shared` lock keeps out only those who want it alone.
    Raises TargetBusy, which names the owner, when the lease is still held after `wait_s`, and TargetError when
    the lease directory cannot be used.
    """
    _make_directory(path.parent)
    deadline = time.monotonic() + wait_s
    next_report = 0.0
    while (descriptor := _try_lock(path, shared)) is None:
        now = time.monotonic()
        if now >= deadline:
            return _last_try(path, shared)
        if now >= next_report:
            report(f"waiting for the lease {path}, held by {describe_holder(path)}")
            next_report = now + REPORT_EVERY_S
        time.sleep(min(POLL_S, max(0.0, deadline - now)))
    return descriptor


def sign(descriptor: int, owner: Owner, token: str, ttl_s: float, renewed_at: float) -> None:
    """Write into a lease file that this process has locked whose it is and when (CLOCK_MONOTONIC) it was renewed."""
    content = {**asdict(owner), "token": token, "ttl_s": ttl_s, "renewed_at": renewed_at, "renewed": _now()}
    # In place, not by rename: the lock belongs to this very file. In one piece: those who share a lock sign in turns.
    os.pwrite(descriptor, _padded(json.dumps(content, ensure_ascii=False)), 0)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lease. It is tried by locking it, for less than LOOK_S seconds."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_same_file(descriptor: int, path: Path) -> bool:
    """False when the file was removed or replaced since it was opened, so that its lock keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def path_of(name: str, directory: Path) -> Path:
    """The absolute path of a lease's file."""
    return (directory / f"{name}.lease").absolute()


def read(path: Path) -> dict[str, Any] | None:
    """The content of a lease file; None when there is none or it says nothing. It does not say that it is held."""
    try:
        return parse(path.read_text())
    except (OSError, ValueError):
        return None


def parse(text: str) -> dict[str, Any] | None:
    """The content of a lease file from its text; None when it says nothing. Anybody may have written it."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    times = (content.get(name, 0.0) for name in ("renewed_at", "ttl_s"))
    return content if all(isinstance(value, int | float) for value in times) else None


def describe_owner(content: Mapping[str, Any] | None) -> str:
    """Whom a lease file names, in words."""
    return "an owner that has not signed it" if content is None else str(Owner.read(content))


def describe_holder(path: Path) -> str:
    """Who holds the lease of this machine in words, and whether that owner still renews it."""
    content = read(path)
    words = describe_owner(content)
    if content is None:
        return words
    age = time.monotonic() - content.get("renewed_at", time.monotonic())
    stale = age > content.get("ttl_s", TTL_S)
    return f"{words}, who no longer renews it: the server is being stopped" if stale else words


def printable(text: str) -> str:
    """The text with what is no printable character, such as a line break, written as an escape."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _last_try(path: Path, shared: bool) -> int:
    # The lock may have been tried by `is_held` just then.
    time.sleep(LOOK_S)
    descriptor = _try_lock(path, shared)
    if descriptor is None:
        raise TargetBusy(
            f"the lease {path} is held by {describe_holder(path)}; "
            "wait for that run to end, or raise targets.<name>.lease_wait_s"
        )
    return descriptor


def _try_lock(path: Path, shared: bool) -> int | None:
    """Open and lock the lease file; None when somebody else has the lock."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if is_same_file(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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
    return text.encode().ljust(SIZE) + b"\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
