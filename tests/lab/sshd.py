"""A throwaway OpenSSH server on loopback, with keys and a configuration of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from commands import LabFailed
from processes import alive, eventually
from ssh_client import Alias, answers_ssh, free_port, known_hosts_line, make_key, write_client_config

SSHD = "/usr/sbin/sshd"
PRIVILEGE_SEPARATION = Path("/run/sshd")
ADDRESS = "127.0.0.1"


@dataclass
class SshServer:
    """A server for the user that runs the tests; a context manager that ends all it has started.

    `folder` holds its keys, configuration and log; `port` is a free one unless it is given. `known_hosts` keeps the key
    that was trusted last: after `rekey` it is the wrong one until `trust` is called.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_key(self.host_key)
        make_key(self.user_key)
        self._authorized_keys.write_bytes(self.user_key.with_suffix(".pub").read_bytes())
        self._configuration.write_text(self._configured())
        self.trust()

    def __enter__(self) -> SshServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def host_key(self) -> Path:
        """The server's private key."""
        return self.folder / "host_key"

    @property
    def user_key(self) -> Path:
        """The private key with which the user may log in."""
        return self.folder / "user_key"

    @property
    def known_hosts(self) -> Path:
        """The file in which the server's key is trusted."""
        return self.folder / "known_hosts"

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        return (self.folder / "sshd.log").read_text()

    @property
    def sessions(self) -> list[psutil.Process]:
        """The server's processes of present connections, without the commands that run in them."""
        if self.process is None:
            return []
        return [child for child in psutil.Process(self.process.pid).children(True) if child.name() == "sshd"]

    def start(self) -> None:
        """Start the server and return when it answers. Raises LabFailed when it does not within 10 s."""
        if os.geteuid() == 0:
            # As root sshd wants this folder, which the unit of an installed server makes.
            PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        argv = [SSHD, "-D", "-f", str(self._configuration), "-E", str(self.folder / "sshd.log")]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        process = self.process
        eventually(lambda: answers_ssh(ADDRESS, self.port) or process.poll() is not None, 10)
        if not answers_ssh(ADDRESS, self.port):
            self.stop()
            raise LabFailed(f"sshd does not answer on port {self.port}:\n{self.log}")

    def stop(self) -> None:
        """End the server, the connections, and the commands that ran in them."""
        if self.process is None:
            return
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.terminate()
        self.process.wait(10)
        self.process = None
        _kill(below)

    def restart(self) -> None:
        """Cut every connection and start again on the same port with the same keys; commands live on, as always."""
        self.end_sessions(server_too=True)
        self.start()

    def end_sessions(self, server_too: bool = False) -> None:
        """Cut every connection; the server stays unless it is to end too."""
        sessions = self.sessions
        if server_too and self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None
        _kill(sessions)

    def rekey(self) -> None:
        """Restart with another key than the one that is in known_hosts."""
        make_key(self.host_key)
        self.restart()

    def trust(self) -> None:
        """Write the server's present key into known_hosts, in place of any other."""
        self.known_hosts.write_text(known_hosts_line(ADDRESS, self.port, self.host_key.with_suffix(".pub")))

    def alias(self, name: str = "lab") -> Alias:
        """Return the client's `Host` block for this server; `dataclasses.replace` makes a wrong one of it."""
        return Alias(name, ADDRESS, self.port, getpass.getuser(), self.user_key, self.known_hosts)

    def client_config(self, *aliases: Alias) -> Path:
        """Write a client's configuration with these aliases, or with `alias()`, and return its path."""
        return write_client_config(self.folder / "ssh_config", aliases or [self.alias()])

    @property
    def _configuration(self) -> Path:
        return self.folder / "sshd_config"

    @property
    def _authorized_keys(self) -> Path:
        return self.folder / "authorized_keys"

    def _configured(self) -> str:
        # StrictModes asks who may write each folder above authorized_keys, which fails below a temporary folder.
        return f"""\
Port {self.port}
ListenAddress {ADDRESS}
HostKey "{self.host_key}"
PidFile "{self.folder / "sshd.pid"}"
AuthorizedKeysFile "{self._authorized_keys}"
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
MaxStartups 100
Subsystem sftp internal-sftp
LogLevel VERBOSE
"""


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    # A zombie is gone enough: its new parent, the machine's PID 1, may reap it seconds later.
    eventually(lambda: not any(alive(process.pid) for process in processes), 10)
