"""The external launcher: an endpoint that is up already. Nothing is started, stopped or copied."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from ddtree_bench.targets import lease
from ddtree_bench.targets.launcher import GONE, CommandResult, Launch, Launcher, ServerState, Stream, TargetError

LOOK_EVERY_S = 1.0
"""How often, at most, `state` tries whether the endpoint still accepts a connection."""

CONNECT_TIMEOUT_S = 2.0

GONE_AFTER = 3
"""Looks in a row that may come to nothing: a busy host may not answer in time, a name may not be found for a moment."""

DEFAULT_PORTS = {"http": 80, "https": 443}


class ExternalLauncher(Launcher):
    """One endpoint at a URL. The lease on it is one of this machine, named after the URL."""

    shares_files = True

    def __init__(self, lease_directory: Path, url: str) -> None:
        self._lease_directory = lease_directory
        self._url = plain_url(url)
        self._looked = -LOOK_EVERY_S
        self._in_vain = 0

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
        """Whether the endpoint accepts connections, tried at most once a second.

        It is gone when it refuses one, or when several looks in a row had no answer.
        """
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._in_vain = _in_vain(self._url, self._in_vain)
            self._looked = time.monotonic()
        return self.stop()

    def stop(self) -> ServerState:
        """Leave the endpoint alone; returns its state as it was seen last."""
        alive = self._in_vain < GONE_AFTER
        return ServerState(alive=alive, reason=None if alive else GONE)

    def stop_all(self) -> list[str]:
        """Leave the endpoint alone."""
        return []

    def base_url(self) -> str:
        """The endpoint's address."""
        return self._url

    def fetch_log(self) -> Path | None:
        """None: the endpoint's log is not at hand."""
        return None

    def python(self, tag: str) -> str:  # noqa: ARG002
        """Raise TargetError: nothing is run on the endpoint's machine."""
        self._refuse("no interpreter of its machine is used")

    def expand(self, path: str) -> str:
        """Raise TargetError: nothing is known of the endpoint's machine."""
        self._refuse(f"{path} there is not known")

    def log_tail(self, lines: int = 20) -> str:  # noqa: ARG002
        """Empty: the endpoint's log is not at hand."""
        return ""

    def copy_in(self, source: Path, destination: str, report: Callable[[str], None] | None = None) -> None:  # noqa: ARG002
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

    def open_stream(self, argv: Sequence[str], on_line: Callable[[str], None]) -> Stream:  # noqa: ARG002
        """Raise TargetError: nothing is run on the endpoint's machine."""
        self._refuse(f"{argv[0]} cannot be run there")

    def _refuse(self, what: str) -> NoReturn:
        raise TargetError(f"{self._url}: is an external endpoint, so {what}; use a target with another launcher")


def plain_url(url: str) -> str:
    """Return an endpoint's address without a final slash or /v1, so that paths can be put behind it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def endpoint_of(url: str) -> str:
    """Return which endpoint a URL is, HOST:PORT and its path, however it is written."""
    parts = urlsplit(plain_url(url))
    host = (parts.hostname or "").lower()
    host = "127.0.0.1" if host == "localhost" else host
    return f"{host}:{parts.port or DEFAULT_PORTS.get(parts.scheme, 0)}{parts.path}"


def lease_name(url: str) -> str:
    """Return the name of the lease on an endpoint; the digest tells apart what the rest of the name does not."""
    endpoint = endpoint_of(url)
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", endpoint).strip("-")
    return f"endpoint-{readable}-{hashlib.sha256(endpoint.encode()).hexdigest()[:8]}"


def _in_vain(url: str, before: int) -> int:
    """How many looks in a row have come to nothing after one more; a refusal counts as all of them."""
    parts = urlsplit(url)
    try:
        with socket.create_connection(
            (parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme, 80)), CONNECT_TIMEOUT_S
        ):
            return 0
    except ConnectionRefusedError:
        return GONE_AFTER
    except OSError:
        return before + 1
