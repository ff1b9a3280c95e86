"""The way to a host: a TCP connection, or a command of OpenSSH's configuration that leads there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from ddtree_bench.targets.ssh.destination import Destination, expand_tokens, login_words, ssh_argv, tokens_of
from ddtree_bench.targets.ssh.failures import (
    ConnectionFailed,
    HostKeyChanged,
    HostKeyUnknown,
    HostUnreachable,
    LoginRefused,
)

SAID_CHARACTERS = 1000
END_TIMEOUT_S = 2.0
LEAST_CONNECT_S = 1.0

FAILURES: tuple[tuple[str, type[ConnectionFailed]], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", HostKeyChanged),
    (r"host key is known for|Host key verification failed", HostKeyUnknown),
    (r"Permission denied \(|Too many authentication failures", LoginRefused),
)
"""What OpenSSH's client says of a host on the way, and the error that it means."""


class Way:
    """An open way to a host's SSH server: `socket`, and the command behind it, if there is one."""

    def __init__(self, way: socket.socket, command: subprocess.Popen[bytes] | None, said: IO[bytes] | None) -> None:
        self.socket = way
        self._command = command
        self._said = said

    def failure(self, destination: Destination, error: object) -> ConnectionFailed:
        """Say why the way came to nothing, as the command has told it where there is one."""
        where = f"{destination.name}: {destination.address}"
        if self._command is None or self._said is None:
            return HostUnreachable(f"{where} does not answer as SSH: {error}; {_reachable(destination)}")
        self.socket.close()
        _end(self._command)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-SAID_CHARACTERS:]
        kinds = (kind for pattern, kind in FAILURES if re.search(pattern, said))
        via = destination.proxy_command or f"ProxyJump {destination.proxy_jump}"
        return next(kinds, HostUnreachable)(
            f"{where} cannot be reached through {via}: {said or error}; {_reachable(destination)}"
        )

    def close(self) -> None:
        """End the command, and let go of the socket. For any thread, and more than once."""
        self.socket.close()
        if self._command is not None and self._said is not None:
            _end(self._command)
            self._said.close()


def open_way(destination: Destination, timeout_s: float) -> Way:
    """Open a way to the destination's SSH server. Raises HostUnreachable when a connection fails within `timeout_s`.

    What fails behind a command shows when the SSH server's greeting does not come.
    """
    if destination.proxy_command is not None:
        command = expand_tokens(destination.proxy_command, tokens_of(destination))
        return _through(destination, ["/bin/sh", "-c", f"exec {command}"])
    if destination.proxy_jump is not None:
        return _through(destination, jump_argv(destination, destination.proxy_jump, destination.address))
    return Way(_connected(destination, timeout_s), None, None)


def jump_argv(destination: Destination, jump: str, address: str) -> list[str]:
    """Return the command line whose stdin and stdout are those of an address behind one host or several, as ProxyJump.

    Each host on the way is reached with OpenSSH's client through those before it, under the same options: none of
    them asks anything or adds a host key.
    """
    before, _, last = jump.rpartition(",")
    options = [f"ProxyCommand={jump_command(destination, before)}"] if before else []
    host = last if last.startswith("ssh://") else f"ssh://{last.replace('%', '%25')}"
    return [*ssh_argv(destination, *options), "-W", address, host]


def jump_command(destination: Destination, jump: str) -> str:
    """Return the ProxyCommand by which OpenSSH's client reaches a host behind those of `jump`."""
    command = shlex.join(jump_argv(destination, jump, "\0"))
    return command.replace("%", "%%").replace("\0", "[%h]:%p")


def silent_environment() -> dict[str, str]:
    """Return the environment in which OpenSSH's client has no window to ask for a passphrase in."""
    return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}


def _through(destination: Destination, argv: list[str]) -> Way:
    ours, theirs = socket.socketpair()
    said = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the way is
    with theirs:
        try:
            command = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=said,
                env=silent_environment(),
                # No terminal: nobody is asked for a passphrase, for no host of the way.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            said.close()
            raise HostUnreachable(f"{destination.name}: {argv[0]} cannot be started here: {error}") from None
    return Way(ours, command, said)


def _connected(destination: Destination, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    found = _addresses(destination, timeout_s)
    share_s = max(LEAST_CONNECT_S, deadline - time.monotonic()) / len(found)
    errors = []
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(share_s)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            errors.append(str(error))
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    raise HostUnreachable(
        f"{destination.name}: {destination.address} cannot be connected to: {', '.join(dict.fromkeys(errors))}; is the "
        f"host up, and the port that of its SSH server? {_reachable(destination)}"
    )


def _addresses(destination: Destination, timeout_s: float) -> list[Any]:
    """What the resolver of this machine knows of the host; it may itself wait for ever, so that a thread asks it."""
    answer: Future[list[Any]] = Future()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(destination.host, destination.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="name of a host", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        raise HostUnreachable(
            f"{destination.name}: the address of the host {destination.host} was not told within {timeout_s:.0f} s; "
            f"see that this machine's name servers answer, or give the host's address; {_reachable(destination)}"
        ) from None
    except (OSError, UnicodeError) as error:
        raise HostUnreachable(
            f"{destination.name}: no address is known for the host {destination.host} ({error}); correct the "
            f"name, or give it a HostName in OpenSSH's configuration; {_reachable(destination)}"
        ) from None


def _reachable(destination: Destination) -> str:
    return f"try `{login_words(destination)}`"


def _end(command: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a command whose socket is closed, and see to it."""
    try:
        command.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()
