"""What the lab needs of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from cgroups import UNIFIED
from commands import LabFailed
from vm import kernel

SSHD = {"sshd": "openssh-server", "ssh": "openssh-client"}
HOSTS = {"systemd-nspawn": "systemd-container", "mmdebstrap": "mmdebstrap", "ip": "iproute2", "ssh": "openssh-client"}
VM = {"qemu-system-x86_64": "qemu-system-x86", "mkfs.ext4": "e2fsprogs", "depmod": "kmod"}
"""Commands by part of the lab, and Debian's packages that have them."""

PATH = "/usr/sbin:/sbin:" + os.environ.get("PATH", "/usr/bin:/bin")


def missing_commands(commands: Mapping[str, str]) -> str | None:
    """The packages that have to be installed, in words; None when all commands are there."""
    packages = sorted({package for command, package in commands.items() if shutil.which(command, path=PATH) is None})
    return f"needs Debian's packages: {' '.join(packages)}" if packages else None


def missing_for_hosts() -> str | None:
    """Why no host can be started on this machine, in words; None when it can."""
    if os.geteuid() != 0:
        return "needs root: hosts have namespaces, mounts and cgroups of their own"
    if not UNIFIED.is_dir():
        return f"needs hybrid cgroups, with cgroup v2 at {UNIFIED}"
    return missing_commands(HOSTS)


def missing_for_vm() -> str | None:
    """What this machine lacks for the virtual machine, in words, when it has what hosts need; None for nothing."""
    try:
        kernel()
    except LabFailed as failure:
        return str(failure)
    return missing_commands(VM)
