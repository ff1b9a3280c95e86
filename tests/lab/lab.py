"""The lab of one session: its key, its hosts, and the configuration with which an OpenSSH client reaches them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import slots
from commands import LabFailed
from nspawn import Host
from root_folder import root_folder
from slots import Slot
from ssh_client import make_key, write_client_config
from vm import VirtualMachine

ENVIRONMENTS = "/opt/environments"
"""Where both hosts of the fixture `two_hosts` have the folder that they share."""


@dataclass
class Lab:
    """Hosts of one session; a context manager that removes them all at its end.

    `folder` is the session's own, for key and configuration; in `cache` lies what is built once for all sessions.
    """

    folder: Path
    cache: Path
    machines: list[Host | VirtualMachine] = field(default_factory=list)

    def __enter__(self) -> Lab:
        slots.remove_abandoned()
        make_key(self.user_key)
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove(*self.machines)

    @property
    def user_key(self) -> Path:
        """The private key with which every host lets root in, and the users that are added."""
        return self.folder / "user_key"

    @property
    def client_config(self) -> Path:
        """The configuration file for `ssh -F`: each machine under its name, as root."""
        return self.folder / "ssh_config"

    @cached_property
    def root_folder(self) -> Path:
        """The root folder that all hosts share."""
        return root_folder(self.cache)

    def start(
        self,
        name: str,
        *,
        via: Host | None = None,
        bind: Mapping[str, Path] | None = None,
        bind_ro: Mapping[str, Path] | None = None,
    ) -> Host:
        """Make a host, boot it, and return it when all its units are up; what the arguments mean: `nspawn.Host`.

        Raises LabFailed when it does not boot, or when the lab has a machine of that name.
        """
        host = Host(name, self._slot(name), self.root_folder, self.user_key, via, bind or {}, bind_ro or {})
        self._boot(host)
        return host

    def start_vm(self) -> VirtualMachine:
        """Make the virtual machine, boot it, and return it when its SSH server answers."""
        vm = VirtualMachine(self._slot("vm"), self.root_folder, self.user_key)
        self._boot(vm)
        return vm

    def remove(self, *machines: Host | VirtualMachine) -> None:
        """End these machines, the last one first, and remove all that they had on this machine."""
        with contextlib.ExitStack() as ends:
            for machine in machines:
                self.machines.remove(machine)
                # Runs in reverse order, and whatever happens at another machine's end.
                ends.callback(machine.remove)
        self._write_client_config()

    def _slot(self, name: str) -> Slot:
        if any(machine.name == name for machine in self.machines):
            raise LabFailed(f"the lab has a machine {name} already")
        return slots.claim(self.cache / "hosts")

    def _boot(self, machine: Host | VirtualMachine) -> None:
        self.machines.append(machine)
        machine.create()
        machine.boot()
        self._write_client_config()

    def _write_client_config(self) -> None:
        write_client_config(self.client_config, [machine.alias for machine in self.machines])
