"""A port of a host that is reached at one of this machine, through OpenSSH's own client: the path of measured data."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress

import psutil

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.processes import HOST, free_port
from ddtree_bench.targets.ssh.destination import Destination, login_words, ssh_argv
from ddtree_bench.targets.ssh.proxy import jump_command, silent_environment

LOOK_EVERY_S = 0.05
END_TIMEOUT_S = 3.0
PORTS = 5
"""How many free ports are tried that somebody else takes first."""

TAKEN = "Address already in use"


class PortForward:
    """One process of OpenSSH's client; `port` of this machine's loopback interface leads to a port of the host.

    It ends with this process, however that ends, and by itself within 15 s when the link is dead: it is not found
    again, since what is measured over it would be something else.
    """

    def __init__(self, destination: Destination, port_there: int, host_there: str = "127.0.0.1") -> None:
        self._destination = destination
        self._there = f"{host_there}:{port_there}"
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the forward may be asked
        self.port = 0

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the port, http://HOST:PORT."""
        return f"http://{HOST}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process is there; it is not for long when the link is dead."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def said(self) -> str:
        """What the process has written, such as connections that the host refused."""
        # Not by reading on: the process writes from where the file, which it shares, was last read or written.
        descriptor = self._said.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace").strip()

    def start(self, timeout_s: float) -> None:
        """Start forwarding, again at the same port as before unless somebody else has taken it.

        Raises TargetError, with what OpenSSH says, when no port leads there within `timeout_s` seconds.
        """
        self.stop()
        deadline = time.monotonic() + timeout_s
        for _ in range(PORTS):
            self._begin()
            while self.alive and time.monotonic() < deadline:
                if self._listens():
                    return
                if self._port_taken():
                    break
                time.sleep(LOOK_EVERY_S)
            taken = self._port_taken()
            self.stop()
            if not taken:
                break
            self.port = 0
        raise TargetError(
            f"{self._destination.name}: port {self._there} there cannot be forwarded to this machine: "
            f"{self.said or f'no answer within {timeout_s:.0f} s'}; try `{login_words(self._destination)}`"
        )

    def stop(self) -> None:
        """End the process, if it is there, and those that it has started."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._process = None

    def _begin(self) -> None:
        self.port = self.port or free_port()
        self._said.truncate(0)
        self._said.seek(0)
        destination = self._destination
        # A forward of the user's configuration whose port is taken must not end this one.
        options = ["ExitOnForwardFailure=no", "RemoteCommand=none", "PermitLocalCommand=no", "LogLevel=INFO"]
        if destination.proxy_jump is not None:
            options.append(f"ProxyCommand={jump_command(destination, destination.proxy_jump)}")
        listen = f"{HOST}:{self.port}:{self._there}"
        # cat on the host reads a pipe that nobody writes: when this process ends, it ends, and with it the forward.
        try:
            self._process = subprocess.Popen(
                [*ssh_argv(destination, *options), "-T", "-L", listen, "--", destination.name, "exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env=silent_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise TargetError(f"{destination.name}: OpenSSH's client cannot be started here: {error}") from None

    def _listens(self) -> bool:
        """Whether it is our process that listens on the port; it does once it is logged in."""
        assert self._process is not None
        try:
            connections = psutil.Process(self._process.pid).net_connections("tcp")
        except psutil.Error:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port for c in connections)

    def _port_taken(self) -> bool:
        return any(TAKEN in line and f":{self.port}" in line for line in self.said.splitlines())
