"""Logging in to a host with keys: those of the agent and those in files. Nothing is asked for, no password is used."""

from __future__ import annotations

import base64
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import UnknownKeyType

from ddtree_bench.targets.ssh.destination import Destination, login_words
from ddtree_bench.targets.ssh.failures import LoginRefused

AGENT_ANSWERS_S = 10.0

NO_KEY = (OSError, ValueError, UnsupportedAlgorithm, UnknownKeyType, paramiko.SSHException)
"""What reading a file raises that holds no private key of a kind that can be used."""


@dataclass
class Attempts:
    """What was tried to log in, in words, for the message when all was in vain."""

    tried: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    encrypted: list[Path] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)


def log_in(transport: paramiko.Transport, destination: Destination) -> None:
    """Log in with the first key that the host accepts, in OpenSSH's order: the agent's, then those in files.

    Raises LoginRefused, which names user, host and all keys that were tried.
    """
    attempts = Attempts()
    with _agent(destination.identity_agent, attempts) as agent:
        for key, words in _keys(destination, agent, attempts):
            attempts.tried.append(f"{key.get_name()} {key.fingerprint} ({words})")
            if _accepted(transport, destination.user, key, attempts):
                return
            if not transport.is_active():
                break
    raise LoginRefused(_refused(destination, attempts))


class _Agent(AgentSSH):
    """The agent behind a socket; the keys that paramiko's own class gives are always those of the environment's."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connect(connection)  # type: ignore[attr-defined]  # the stubs leave it out; there is no public way


@contextmanager
def _agent(path: str | None, attempts: Attempts) -> Iterator[tuple[AgentKey, ...]]:
    """The keys of an agent, which can be used within the block; none where there is no agent."""
    if path is None:
        yield ()
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(AGENT_ANSWERS_S)
        try:
            connection.connect(path)
            keys = _Agent(connection).get_keys()
        except (OSError, paramiko.SSHException) as error:
            attempts.unusable.append(f"the agent at {path}: {error}")
            keys = ()
        yield keys


def _keys(
    destination: Destination, agent: tuple[AgentKey, ...], attempts: Attempts
) -> Iterator[tuple[paramiko.PKey, str]]:
    """Each key to try, and where it is from."""
    listed = {public: path for path in destination.identity_files if (public := _public_part(path)) is not None}
    # A stable sort: the agent's keys that the configuration names come first.
    for key in sorted(agent, key=lambda key: key.blob not in listed):
        if key.blob in listed or not destination.identities_only:
            yield key, f"agent, {key.comment}"
    held = {key.blob for key in agent}
    for path in destination.identity_files:
        if _public_part(path) in held:
            continue
        try:
            yield paramiko.PKey.from_path(path), str(path)
        except FileNotFoundError:
            continue
        except TypeError:
            # What cryptography raises for a key that needs a passphrase.
            attempts.encrypted.append(path)
        except NO_KEY as error:
            attempts.unusable.append(f"{path}: {error}")


def _public_part(path: Path) -> bytes | None:
    """The public part of a key, from the file beside it: the key itself may be in the agent only, or encrypted."""
    try:
        words = path.with_name(path.name.removesuffix(".pub") + ".pub").read_text().split()
        return base64.b64decode(words[1], validate=True)
    except (OSError, ValueError, IndexError):
        return None


def _accepted(transport: paramiko.Transport, user: str, key: paramiko.PKey, attempts: Attempts) -> bool:
    try:
        attempts.methods.update(transport.auth_publickey(user, key))
    except paramiko.BadAuthenticationType as error:
        attempts.methods.update(error.allowed_types)
    except paramiko.AuthenticationException as error:
        if not transport.is_active():
            attempts.unusable.append(f"the host ended the attempt: {error}")
    except (paramiko.SSHException, OSError, EOFError) as error:
        attempts.unusable.append(f"{key.fingerprint}: {error}")
    return transport.is_authenticated()


def _refused(destination: Destination, attempts: Attempts) -> str:
    files = ", ".join(map(str, destination.identity_files))
    parts = [f"keys tried: {', '.join(attempts.tried) or f'none (no agent has one, nor is one in {files})'}"]
    if attempts.unusable:
        parts.append(f"of no use: {', '.join(attempts.unusable)}")
    if attempts.methods:
        parts.append(f"the host wants {', '.join(sorted(attempts.methods))}")
    if attempts.encrypted:
        add = shlex.join(["ssh-add", *map(str, attempts.encrypted)])
        parts.append(f"no passphrase is asked for here, so start ssh-agent and give it the encrypted keys: `{add}`")
    else:
        quiet = login_words(destination).replace("ssh ", "ssh -o BatchMode=yes ", 1)
        parts.append(f"put the public part of a key into the host's authorized_keys until `{quiet}` works")
    return f"{destination.name}: {destination.user} may not log in to {destination.address}: {'; '.join(parts)}"
