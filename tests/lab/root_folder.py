"""The root folder that all hosts of the lab share: a small Debian with systemd and an SSH server."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import tempfile
import uuid
from pathlib import Path

from commands import LabFailed, call
from ssh_client import make_key

PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "dbus-user-session",
    "libpam-systemd",
    "openssh-server",
    "python3",
    "iproute2",
    "procps",
    "sudo",
    "kmod",
)
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "systemd-networkd-wait-online.service",
    "console-getty.service",
    "getty@.service",
    "serial-getty@.service",
)
INIT = "/sbin/lab-init"
INIT_TEXT = """\
#!/bin/sh
# In a container the controllers of cgroup v1 are read-only at first; systemd is to set limits with them.
for controller in memory pids cpu cpuacct blkio; do
    mount -o remount,bind,rw "/sys/fs/cgroup/$controller" 2>/dev/null
done
exec /lib/systemd/systemd "$@"
"""
SSHD_TEXT = "PermitRootLogin prohibit-password\nUseDNS no\n"
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
BUILD_TIMEOUT_S = 600.0


def lab_folder() -> Path:
    """The folder in which the lab keeps what is built once: $DDTREE_BENCH_LAB, or one for temporary files."""
    return Path(os.environ.get("DDTREE_BENCH_LAB") or Path(tempfile.gettempdir()) / "ddtree-bench-lab")


def root_folder(cache: Path) -> Path:
    """Return the root folder below `cache`; it is built there first, in a minute, when its recipe is a new one.

    Raises LabFailed when the build fails, with what mmdebstrap said.
    """
    cache.mkdir(parents=True, exist_ok=True, mode=0o755)
    finished = cache / f"root-{_digest()}"
    with (cache / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.is_dir():
            _build(finished.with_name(f"{finished.name}.partial"), finished, lock.fileno())
    return finished


def give_identity(root: Path, name: str, user_key: Path) -> Path:
    """Make one host of a root folder: its names and keys; root may log in with the private `user_key`.

    Returns the host's own public key.
    """
    (root / "etc/hostname").write_text(f"{name}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
    authorized = root / "root/.ssh/authorized_keys"
    authorized.parent.mkdir(mode=0o700, exist_ok=True)
    authorized.write_bytes(user_key.with_suffix(".pub").read_bytes())
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    make_key(host_key)
    return host_key.with_suffix(".pub")


def _digest() -> str:
    recipe = [PACKAGES, LEFT_OUT, MASKED, INIT_TEXT, SSHD_TEXT, _suite()]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]


def _suite() -> str:
    return platform.freedesktop_os_release()["VERSION_CODENAME"]


def _build(partial: Path, finished: Path, lock: int) -> None:
    # What a killed session leaves of a build is a folder, never a mount: builds have a mount namespace of their own.
    call("rm", "-rf", "--one-file-system", str(partial))
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    options += ["--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Languages "none"']
    call(
        *("unshare", "--mount", "--propagation", "private", "mmdebstrap", "--quiet", "--variant=minbase"),
        *(f"--include={','.join(PACKAGES)}", *options, _suite(), str(partial), _sources()),
        timeout_s=BUILD_TIMEOUT_S,
        # mmdebstrap holds the lock as well: where its session is killed and it goes on, nobody builds beside it.
        pass_fds=[lock],
    )
    _furnish(partial)
    partial.rename(finished)


def _sources() -> str:
    """The machine's own list of where Debian's packages come from."""
    for name in SOURCES:
        if Path(name).is_file() and Path(name).stat().st_size:
            return name
    raise LabFailed(f"none of {', '.join(SOURCES)}: the root folder is built from this machine's apt sources")


def _furnish(root: Path) -> None:
    init = root / INIT.lstrip("/")
    init.write_text(INIT_TEXT)
    init.chmod(0o755)
    for unit in MASKED:
        mask = root / "etc/systemd/system" / unit
        mask.unlink(missing_ok=True)
        mask.symlink_to("/dev/null")
    (root / "etc/ssh/sshd_config.d/lab.conf").write_text(SSHD_TEXT)
    # Each host has a key and an identity of its own.
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    # The journal is kept on disk where this folder is there.
    (root / "var/log/journal").mkdir(exist_ok=True)
