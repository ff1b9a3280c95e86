"""One request on one connection: what is sent, and the raw bytes of the answer with the moments they were read.

The reading loop stamps and keeps bytes and does nothing else; what they say is worked out after the measurement
(`requests_table`), because time spent on parsing in one thread would delay the stamps of all others. Bytes are read
raw: line iterators that fill a buffer first make most gaps zero on streams that are not chunked.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter

from ddtree_bench.plan import Workload

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_PIECE = 65536


@dataclass(frozen=True)
class Timeouts:
    """Limits of one request, seconds.

    `idle_s` is the longest silence, the wait for the first byte (queueing, prefill) included. `total_s` is looked at
    whenever bytes arrive, so a request ends at the latest after total_s + idle_s.
    """

    connect_s: float = 10.0
    idle_s: float = 300.0
    total_s: float = 3600.0


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class Failure:
    """How an exchange broke off: one of the statuses connect_error, timeout and truncated, and the message."""

    status: str
    message: str


@dataclass(frozen=True)
class Exchange:
    """The raw record of one request: moments are seconds of time.perf_counter().

    `reads` holds (moment, bytes) for every piece of the body, in order; `t_end` is when the stream closed or failed.
    """

    t_send: float
    t_end: float
    reads: list[tuple[float, bytes]] = field(repr=False)
    http_status: int | None
    content_type: str
    failure: Failure | None

    @property
    def body(self) -> bytes:
        """All bytes of the answer's body."""
        return b"".join(piece for _, piece in self.reads)


def request_body(workload: Workload, text: str, model: str) -> dict[str, Any]:
    """Return the JSON body for one prompt.

    Sampling is always sent in full: a server's own defaults differ by engine and model, and a default top_k of 1 makes
    sampling greedy without a word.
    """
    prompt: dict[str, Any] = {"prompt": text}
    if workload.endpoint == "chat":
        prompt = {"messages": [{"role": "user", "content": text}]}
    return {
        "model": model,
        **prompt,
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        "seed": workload.seed,
        "ignore_eos": workload.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
    }


class _Adapter(HTTPAdapter):
    """Keeps one connection and the socket under it, so that another thread can cut it. Never retries."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        adapter = self

        class Connection(urllib3.connection.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                adapter.sock = self.sock

        class TlsConnection(urllib3.connection.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                adapter.sock = self.sock

        class Pool(urllib3.HTTPConnectionPool):
            ConnectionCls = Connection

        class TlsPool(urllib3.HTTPSConnectionPool):
            ConnectionCls = TlsConnection

        self.poolmanager.pool_classes_by_scheme = {"http": Pool, "https": TlsPool}


class Connection:
    """One client of the server: one session, one connection, one request at a time.

    `interrupt` may be called from another thread; everything else belongs to one.
    """

    def __init__(self, base_url: str, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeouts = timeouts
        self._interrupted: str | None = None
        self._adapter = _Adapter()
        self._session = requests.Session()
        # A proxy or netrc of the environment must not stand between client and server, nor may compression.
        self._session.trust_env = False
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.mount("http://", self._adapter)
        self._session.mount("https://", self._adapter)

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def open(self) -> str | None:
        """Connect before the clock runs, by asking for the list of models; return the error if there was one.

        Without this the first wave of requests pays for its connections. An error is not raised: the requests that
        follow meet it themselves and record it.
        """
        limits = (self._timeouts.connect_s, self._timeouts.idle_s)
        try:
            self._session.get(f"{self._base_url}/v1/models", timeout=limits)
        except requests.RequestException as error:
            return str(error)
        return None

    def interrupt(self, reason: str) -> None:
        """End the request in flight at once, and every later one; its exchange fails with `reason`."""
        self._interrupted = reason
        if sock := self._adapter.sock:
            # The socket may have been closed by its own thread in the meantime, which is just as well.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def exchange(self, path: str, body: dict[str, Any]) -> Exchange:
        """Send one request and read its answer to the end; every way to fail is in the result, none is raised."""
        request = self._session.prepare_request(requests.Request("POST", f"{self._base_url}{path}", json=body))
        limits = (self._timeouts.connect_s, self._timeouts.idle_s)
        http_status, content_type, failure = None, "", None
        reads: list[tuple[float, bytes]] = []
        t_send = time.perf_counter()
        try:
            if self._interrupted:
                raise ConnectionAbortedError(self._interrupted)
            with self._session.send(request, stream=True, timeout=limits, allow_redirects=False) as response:
                http_status = response.status_code
                content_type = response.headers.get("Content-Type", "")
                self._read(response.raw, reads, t_send + self._timeouts.total_s)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            failure = self._failure(error, http_status)
        t_end = time.perf_counter()
        if failure is None and self._interrupted:
            failure = Failure("truncated", f"interrupted: {self._interrupted}")
        return Exchange(t_send, t_end, reads, http_status, content_type, failure)

    @staticmethod
    def _read(raw: urllib3.HTTPResponse, reads: list[tuple[float, bytes]], deadline: float) -> None:
        while piece := raw.read1(_PIECE):
            now = time.perf_counter()
            reads.append((now, piece))
            if now > deadline:
                raise TimeoutError("total time limit reached while the answer was still coming")

    def _failure(self, error: Exception, http_status: int | None) -> Failure:
        if self._interrupted:
            return Failure("truncated", f"interrupted: {self._interrupted}")
        timeouts = (requests.ReadTimeout, urllib3.exceptions.TimeoutError, TimeoutError)
        if isinstance(error, timeouts):
            return Failure("timeout", str(error))
        return Failure("connect_error" if http_status is None else "truncated", str(error))
