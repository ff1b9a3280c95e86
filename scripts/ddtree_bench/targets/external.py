"""The external launcher: an endpoint that is up already. Nothing is started, stopped or copied."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from ddtree_bench.targets import lease
from ddtree_bench.targets.launcher import GONE, CommandResult, Launch, Launcher, ServerState, TargetError

LOOK_EVERY_S = 1.0
"""How often, at most, `state` tries whether the endpoint still accepts a connection."""

CONNECT_TIMEOUT_S = 2.0
DEFAULT_PORTS = {"http": 80, "https": 443}


class ExternalLauncher(Launcher):
    """One endpoint at a URL. The lease on it is one of this machine, named after the URL."""

    shares_files = True

    def __init__(self, lease_directory: Path, url: str) -> None:
        self._lease_directory = lease_directory
        self._url = plain_url(url)
        self._looked = -LOOK_EVERY_S
        self._alive = True

    def acquire(self, run: str, wait_s: float, report: Callable[[str], None]) -> lease.Lease:
        """Take this machine's lease on the endpoint; runs of other machines do not see it."""
        return lease.acquire(lease_name(self._url), self._lease_directory, run=run, wait_s=wait_s, report=report)

    def free_port(self) -> int:
        """Raise TargetError: no server is started here."""
        self._refuse("a server cannot be started")

    def start(self, launch: Launch) -> None:
        """Raise TargetError: the endpoint is up already."""
        self._refuse(f"server {launch.name} cannot be started")

    def state(self) -> ServerState:
        """Whether the endpoint accepts connections, tried at most once a second."""
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._alive = _accepts(self._url)
            self._looked = time.monotonic()
        return ServerState(alive=self._alive, reason=None if self._alive else GONE)

    def stop(self) -> ServerState:
        """Leave the endpoint alone; returns its state as it was seen last."""
        return ServerState(alive=self._alive, reason=None if self._alive else GONE)

    def stop_all(self) -> list[str]:
        """Leave the endpoint alone."""
        return []

    def base_url(self) -> str:
        """The endpoint's address."""
        return self._url

    def log_tail(self, lines: int = 20) -> str:  # noqa: ARG002
        """Empty: the endpoint's log is not at hand."""
        return ""

    def copy_in(self, source: Path, destination: str) -> None:  # noqa: ARG002
        """Raise TargetError: nothing is known of the endpoint's machine."""
        self._refuse(f"{source} cannot be copied there")

    def copy_out(self, source: str, destination: Path) -> None:  # noqa: ARG002
        """Raise TargetError: nothing is known of the endpoint's machine."""
        self._refuse(f"{source} cannot be copied from there")

    def run_command(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,  # noqa: ARG002
        stdin: str = "",  # noqa: ARG002
        report: Callable[[str], None] | None = None,  # noqa: ARG002
    ) -> CommandResult:
        """Raise TargetError: nothing is run on the endpoint's machine."""
        self._refuse(f"{argv[0]} cannot be run there")

    def _refuse(self, what: str) -> NoReturn:
        raise TargetError(f"{self._url}: is an external endpoint, so {what}; use a target with another launcher")


def plain_url(url: str) -> str:
    """Return an endpoint's address without a final slash or /v1, so that paths can be put behind it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def lease_name(url: str) -> str:
    """Return the name of the lease on an endpoint: its host, port and path, however the URL is written."""
    parts = urlsplit(plain_url(url))
    host = (parts.hostname or "").lower()
    host = "127.0.0.1" if host == "localhost" else host
    port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"endpoint-{host}-{port}{parts.path}").strip("-")


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection(
            (parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme, 80)), CONNECT_TIMEOUT_S
        ):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        # A busy host may not answer in time; its requests say what is the matter.
        return True
