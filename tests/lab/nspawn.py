"""A host with systemd as its first process, in a systemd-nspawn container: boots in a second, dies like a machine."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cgroups
import psutil
from commands import LabFailed
from networks import Network
from processes import eventually
from root_folder import INIT, give_identity
from slots import Slot
from ssh_client import Alias, known_hosts_line

BOOT_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
REBOOT_STATUS = 133
"""nspawn's exit status when the host asked for a reboot."""

INSTALL_KEY = """\
home=$(getent passwd "$1" | cut -d: -f6)
install -d -m 700 -o "$1" "$home/.ssh"
install -m 600 -o "$1" /dev/stdin "$home/.ssh/authorized_keys"
"""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(eq=False)
class Host:
    """One host; `name` is its host name, `via` the host through which alone it is reached.

    `lower` is the root folder that it shares with others. With `user_key`, a private key, root may log in, and every
    user that is added. `bind` and `bind_ro` name folders or files of this machine by the path at which the host
    has them.
    """

    name: str
    slot: Slot
    lower: Path
    user_key: Path
    via: Host | None = None
    bind: Mapping[str, Path] = field(default_factory=dict)
    bind_ro: Mapping[str, Path] = field(default_factory=dict)
    cgroups: list[Path] = field(default_factory=list)
    nspawn: subprocess.Popen[bytes] | None = None

    @property
    def network(self) -> Network:
        """The host's network."""
        return Network(self.slot.number, self.slot.name, None if self.via is None else self.via.slot.name)

    @property
    def address(self) -> str:
        """The host's IP address."""
        return self.network.address

    @property
    def root(self) -> Path:
        """The host's root folder as this machine sees it, without what is mounted in the host."""
        return self.slot.root

    @property
    def known_hosts(self) -> Path:
        """The file in which the host's key is trusted."""
        return self.slot.folder / "known_hosts"

    @property
    def alias(self) -> Alias:
        """The client's `Host` block for root; `dataclasses.replace` makes another of it."""
        jump = None if self.via is None else self.via.name
        return Alias(self.name, self.address, 22, "root", self.user_key, self.known_hosts, jump)

    @property
    def console(self) -> str:
        """What the host and nspawn have printed on the console."""
        return (self.slot.folder / "console.log").read_text()

    @property
    def boot_id(self) -> str:
        """Identifies the present boot."""
        return self.exec("cat", "/proc/sys/kernel/random/boot_id").strip()

    def create(self) -> None:
        """Make the root folder, network and cgroups of a host that has not been booted yet."""
        self.slot.mount(self.lower)
        host_key = give_identity(self.root, self.name, self.user_key)
        self.known_hosts.write_text(known_hosts_line(self.address, 22, host_key))
        self.network.create()
        self.cgroups = cgroups.create(self.slot.name)

    def boot(self) -> None:
        """Boot, for the first time or again, and return when all its units are up.

        Raises LabFailed when it is not `running` after BOOT_TIMEOUT_S, with the units that failed and the console.
        """
        binds = [f"--bind={source}:{place}" for place, source in self.bind.items()]
        binds += [f"--bind-ro={source}:{place}" for place, source in self.bind_ro.items()]
        argv = [
            *("systemd-nspawn", "--quiet", f"--directory={self.root}", f"--machine={self.slot.name}"),
            *(f"--hostname={self.name}", f"--network-namespace-path=/run/netns/{self.slot.name}"),
            # Without a system bus on this machine there is nobody to register with.
            *("--keep-unit", "--register=no", "--kill-signal=SIGRTMIN+3", "--console=pipe"),
            *("--resolv-conf=off", "--timezone=off", "--link-journal=no", *binds),
            *(INIT, "systemd.show_status=0"),
        ]
        with (self.slot.folder / "console.log").open("ab") as console:
            self.nspawn = subprocess.Popen(
                cgroups.entered(self.cgroups, argv), stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
            )
        state = ""

        def booted() -> bool:
            nonlocal state
            state = self._system_state()
            return state in ("running", "degraded") or not self.alive

        eventually(booted, BOOT_TIMEOUT_S)
        if state != "running":
            failed = self.exec("systemctl", "--failed", "--no-legend", "--plain", check=False) if self.alive else ""
            raise LabFailed(f"host {self.name} is {state or 'dead'}, not running\n{failed}{self.console}")

    @property
    def alive(self) -> bool:
        """Whether the host is powered."""
        return self.nspawn is not None and self.nspawn.poll() is None

    def exec(
        self, *argv: str, stdin: str = "", timeout_s: float = 30.0, check: bool = True, user: str | None = None
    ) -> str:
        """Run a command in the host, as root or as `user`, without SSH, and return what it printed.

        Raises LabFailed when it takes longer than `timeout_s`, and with `check` when it does not end with 0.
        """
        if user is not None:
            argv = ("runuser", "-u", user, "--", *argv)
        done = self._enter(argv, stdin, timeout_s)
        if check and done.returncode != 0:
            said = done.stderr.strip() or done.stdout.strip()
            raise LabFailed(f"host {self.name}: {shlex.join(argv)}: exit status {done.returncode}: {said}")
        return done.stdout

    def stop(self) -> None:
        """Power off in order; the host can be booted again. Raises LabFailed when that takes over STOP_TIMEOUT_S."""
        if self.nspawn is None:
            return
        self.nspawn.terminate()
        try:
            self.nspawn.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.crash()
            raise LabFailed(f"host {self.name} did not power off within {STOP_TIMEOUT_S:g} s\n{self.console}") from None

    def crash(self) -> None:
        """Cut the power: all its processes end at once, and no peer is told."""
        cgroups.kill(self.slot.name)
        if self.nspawn is not None:
            self.nspawn.wait(10)

    def reboot(self) -> None:
        """Reboot in order and return when all units are up again. Raises LabFailed."""
        assert self.nspawn is not None
        self.exec("systemctl", "reboot", "--no-block")
        status = self.nspawn.wait(STOP_TIMEOUT_S)
        if status != REBOOT_STATUS:
            raise LabFailed(f"host {self.name} ended with {status} where it should have rebooted\n{self.console}")
        self.boot()

    def remove(self) -> None:
        """End the host and remove all that it had on this machine."""
        try:
            self.stop()
        finally:
            self.slot.release()

    def add_user(self, name: str, *, lingering: bool = False, sudo: bool = False) -> None:
        """Add a user who may log in with the lab's key; `sudo` lets it do everything as root without a password."""
        self.exec("useradd", "--create-home", "--shell", "/bin/bash", name)
        self.exec("sh", "-ec", INSTALL_KEY, "sh", name, stdin=self.user_key.with_suffix(".pub").read_text())
        if lingering:
            self.exec("loginctl", "enable-linger", name)
        if sudo:
            self.write_file(f"/etc/sudoers.d/{name}", f"{name} ALL=(ALL) NOPASSWD: ALL\n", mode=0o440)

    def write_file(self, path: str, text: str, *, mode: int = 0o644, owner: str = "root") -> None:
        """Write a file in the host, with the folders above it."""
        self.exec("install", "-D", "-m", f"{mode:o}", "-o", owner, "/dev/stdin", path, stdin=text)

    @contextlib.contextmanager
    def small_disk(self, path: str, size_mib: int) -> Iterator[None]:
        """Mount a disk of `size_mib` MiB at a folder in the host, which is made."""
        self.exec("mkdir", "-p", path)
        self.exec("mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=1777", "small-disk", path)
        try:
            yield
        finally:
            if self.alive:
                self.exec("umount", "--lazy", path, check=False)

    @contextlib.contextmanager
    def link_cut(self) -> Iterator[None]:
        """Cut the host's link for as long as the context lasts; nobody is told, packets vanish."""
        self.network.link_down()
        try:
            yield
        finally:
            self.network.link_up()

    def _system_state(self) -> str:
        with contextlib.suppress(LabFailed):
            return self._enter(["systemctl", "is-system-running"], "", 10).stdout.strip()
        return ""

    def _first_process(self) -> int:
        """This machine's number of the host's process 1. Raises LabFailed when the host is not powered."""
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            children = psutil.Process(self.nspawn.pid).children() if self.nspawn is not None else []
            for child in children:
                # While nspawn starts it has another child, which still sees this machine's files.
                if re.search(r"^NSpid:.*\t1$", Path(f"/proc/{child.pid}/status").read_text(), re.MULTILINE):
                    return child.pid
        raise LabFailed(f"host {self.name} is not powered")

    def _enter(self, argv: Sequence[str], stdin: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self._first_process()), "--all", "--"]
        clean = ["env", "-i", f"PATH={SYSTEM_PATH}", "LC_ALL=C.UTF-8"]
        command = cgroups.entered(self.cgroups, [*enter, *clean, *argv])
        try:
            return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise LabFailed(f"host {self.name}: {shlex.join(argv)}: not done after {timeout_s:g} s") from None
