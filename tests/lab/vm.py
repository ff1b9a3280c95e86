"""A virtual machine with Debian's own kernel: its systemd has all of cgroup v2, which hosts in containers have not."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import cgroups
from commands import LabFailed, call
from processes import eventually
from root_folder import give_identity
from slots import Slot
from ssh_client import Alias, answers_ssh, free_port, known_hosts_line

ADDRESS = "127.0.0.1"
ADDRESS_INSIDE = "10.0.2.15"
BOOT_TIMEOUT_S = 120.0
DISK_BYTES = 1500 * 2**20
MEMORY_MIB = 1024
KERNEL = "vmlinuz-"
NETWORK_MODULES = ("virtio_pci", "virtio_net")
NETWORK_UNIT = f"""\
[Unit]
DefaultDependencies=no
After=local-fs.target
Before=network.target ssh.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/sbin/modprobe --all {" ".join(NETWORK_MODULES)}
ExecStart=/sbin/ip link set eth0 up
ExecStart=/sbin/ip address add {ADDRESS_INSIDE}/24 dev eth0
[Install]
WantedBy=multi-user.target
"""


@dataclass(eq=False)
class VirtualMachine:
    """A machine `vm` that is reached over SSH alone, at a loopback port.

    `lower` is the lab's root folder; with `user_key`, a private key, root may log in. The machine is emulated: it boots
    in a quarter of a minute, and computes some ten times slower than this one.
    """

    slot: Slot
    lower: Path
    user_key: Path
    port: int = field(default_factory=free_port)
    name: str = "vm"
    qemu: subprocess.Popen[bytes] | None = None

    @property
    def alias(self) -> Alias:
        """The client's `Host` block."""
        return Alias(self.name, ADDRESS, self.port, "root", self.user_key, self.slot.folder / "known_hosts")

    @property
    def console(self) -> str:
        """What kernel and systemd have printed."""
        return (self.slot.folder / "console.log").read_text(errors="replace")

    def create(self) -> None:
        """Write the disk of a machine that has not been booted yet."""
        self.slot.mount(self.lower)
        host_key = give_identity(self.slot.root, self.name, self.user_key)
        self.alias.known_hosts.write_text(known_hosts_line(ADDRESS, self.port, host_key))
        (self.slot.root / "etc/fstab").write_text("/dev/nvme0n1 / ext4 rw,noatime 0 1\n")
        _install_network(self.slot.root)
        with self._disk.open("wb") as disk:
            disk.truncate(DISK_BYTES)
        call("mkfs.ext4", "-q", "-F", "-d", str(self.slot.root), str(self._disk))

    def boot(self) -> None:
        """Boot and return when the SSH server answers. Raises LabFailed when it does not within BOOT_TIMEOUT_S."""
        # The kernel has its drivers for NVMe and ext4 built in, so that it needs no initrd.
        argv = [
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MIB)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-serial", f"file:{self.slot.folder / 'console.log'}", "-kernel", str(kernel())),
            *("-append", "root=/dev/nvme0n1 rw console=ttyS0 quiet systemd.show_status=0 mitigations=off"),
            *("-drive", f"file={self._disk},if=none,id=disk,format=raw,cache=unsafe"),
            *("-device", "nvme,drive=disk,serial=disk", "-device", "virtio-net-pci,netdev=net,romfile="),
            *("-netdev", f"user,id=net,restrict=on,hostfwd=tcp:{ADDRESS}:{self.port}-{ADDRESS_INSIDE}:22"),
        ]
        # In cgroups of its own it is found and ended by a later session when this one is killed.
        command = cgroups.entered(cgroups.create(self.slot.name), argv)
        qemu = self.qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        eventually(lambda: answers_ssh(ADDRESS, self.port, 5) or qemu.poll() is not None, BOOT_TIMEOUT_S)
        if not answers_ssh(ADDRESS, self.port, 5):
            raise LabFailed(f"the virtual machine does not answer after {BOOT_TIMEOUT_S:g} s\n{self.console}")

    def remove(self) -> None:
        """Cut the power and remove all that the machine had on this one."""
        self.slot.release()
        if self.qemu is not None:
            self.qemu.wait(10)

    @property
    def _disk(self) -> Path:
        return self.slot.folder / "disk.img"


def kernel() -> Path:
    """The newest of Debian's kernels for virtual machines on this machine. Raises LabFailed when there is none."""
    kernels = sorted(Path("/boot").glob(f"{KERNEL}*-cloud-amd64"), key=lambda path: path.stat().st_mtime)
    if not kernels:
        raise LabFailed("no kernel for the virtual machine: install Debian's package linux-image-cloud-amd64")
    return kernels[-1]


def _install_network(root: Path) -> None:
    """Install what brings the network up: the drivers, and the unit that loads them."""
    units = root / "etc/systemd/system"
    (units / "lab-network.service").write_text(NETWORK_UNIT)
    (units / "multi-user.target.wants/lab-network.service").symlink_to("../lab-network.service")
    version = kernel().name.removeprefix(KERNEL)
    for line in call("modprobe", "--set-version", version, "--show-depends", "--all", *NETWORK_MODULES).splitlines():
        module = line.removeprefix("insmod ").strip()
        call("install", "-D", "-m", "644", module, f"{root}{module}")
    call("depmod", "--basedir", str(root), version)
