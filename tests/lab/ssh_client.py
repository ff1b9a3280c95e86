"""What an OpenSSH client needs to reach the lab's hosts: keys, known_hosts, a configuration, a port."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from commands import call


@dataclass(frozen=True)
class Alias:
    """One `Host` block of a client's configuration."""

    name: str
    hostname: str
    port: int
    user: str
    identity_file: Path
    known_hosts: Path
    proxy_jump: str | None = None

    def block(self) -> str:
        """Return the block's text."""
        lines = [
            f"Host {self.name}",
            f"    HostName {self.hostname}",
            f"    Port {self.port}",
            f"    User {self.user}",
            f'    IdentityFile "{self.identity_file}"',
            "    IdentitiesOnly yes",
            f'    UserKnownHostsFile "{self.known_hosts}"',
        ]
        if self.proxy_jump is not None:
            lines.append(f"    ProxyJump {self.proxy_jump}")
        return "\n".join(lines) + "\n"


def write_client_config(path: Path, aliases: Iterable[Alias]) -> Path:
    """Write the configuration file of an OpenSSH client (`ssh -F`) and return its path."""
    path.write_text("\n".join(alias.block() for alias in aliases))
    return path


def make_key(path: Path) -> None:
    """Make an ed25519 key without a passphrase at `path` and its public half beside it, in place of what is there."""
    path.unlink(missing_ok=True)
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))


def known_hosts_line(hostname: str, port: int, public_key: Path) -> str:
    """Return the line of known_hosts with which a client trusts the key of `public_key` at this address."""
    where = hostname if port == 22 else f"[{hostname}]:{port}"
    kind, key = public_key.read_text().split()[:2]
    return f"{where} {kind} {key}\n"


def answers_ssh(hostname: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether an SSH server greets whoever connects there."""
    try:
        with socket.create_connection((hostname, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
