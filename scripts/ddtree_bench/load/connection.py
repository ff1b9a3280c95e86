"""One user's connection to the server: it connects, sends, and hands the answer to the reading thread."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from array import array
from dataclasses import dataclass
from urllib.parse import urlsplit

from ddtree_bench.load.exchange import Exchange, Failure, Limits
from ddtree_bench.load.reader import Reader, Reading, ask_for_stamps

_FIRST_PAUSE_S = 0.1
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Flight:
    """A request as it went; fields as in Exchange. `reading` is None when nothing was sent."""

    t_send: float
    t_sent: float
    failure: Failure | None
    connect_s: float | None
    retries: int
    reading: Reading | None = None

    def exchange(self, reader: Reader) -> Exchange:
        """Return the raw record; worked out after the measurement, since it costs time a read."""
        reading = self.reading
        return Exchange(
            t_send=self.t_send,
            t_sent=self.t_sent,
            t_end=reading.t_end if reading else self.t_sent,
            times=array("d", [time for time, _, _ in reading.reads] if reading else []),
            lags=reader.lags(reading) if reading else array("d"),
            pieces=[piece for _, piece, _ in reading.reads] if reading else [],
            failure=self.failure,
            connect_s=self.connect_s,
            retries=self.retries,
        )


class NotConnected(OSError):
    """No connection within the tries that are allowed; `retries` were made after the first."""

    def __init__(self, error: OSError, retries: int) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.retries = retries


class Connection:
    """One request at a time over one connection that is kept open; `stopping` cuts the pauses between tries short."""

    def __init__(self, base_url: str, limits: Limits, reader: Reader, stopping: threading.Event) -> None:
        url = urlsplit(base_url)
        self._host, self._port = url.hostname or "", url.port or _PORTS[url.scheme]
        # A default context checks the server's certificate and name.
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._limits = limits
        self._reader = reader
        self._stopping = stopping
        self._sock: socket.socket | None = None

    def close(self) -> None:
        """Close the connection; the next exchange opens another one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def open(self) -> str | None:
        """Connect before the clock runs; return the error if there was one.

        Without this the first wave of requests pays for its connections. An error is not raised: the requests that
        follow meet it themselves and record it.
        """
        try:
            self._connect()
        except NotConnected as error:
            return str(error)
        return None

    def ask(self, request: bytes) -> Flight:
        """Send one request and wait for the end of its answer; every way to fail is in the result, none is raised."""
        connect_s, retries = None, 0
        if self._sock is None or self._was_closed(self._sock):
            self.close()
            begun = time.perf_counter()
            try:
                retries = self._connect()
            except NotConnected as error:
                now = time.perf_counter()
                failure = Failure("connect_error", f"no connection to {self._host}:{self._port}: {error}")
                return Flight(now, now, failure, now - begun, error.retries)
            connect_s = time.perf_counter() - begun
        assert self._sock is not None
        return self._send(self._sock, request, connect_s, retries)

    def _send(self, sock: socket.socket, request: bytes, connect_s: float | None, retries: int) -> Flight:
        t_send = time.perf_counter()
        try:
            _send_all(sock, request, t_send + self._limits.idle_s)
            t_sent = time.perf_counter()
        except OSError as error:
            now = time.perf_counter()
            self.close()
            status = "timeout" if isinstance(error, TimeoutError) else "connect_error"
            failure = Failure(status, f"the request could not be sent: {error}")
            return Flight(t_send, now, failure, connect_s, retries)
        reading = self._reader.begin(sock, t_sent, self._limits)
        reading.wait()
        if not reading.reusable:
            self.close()
        return Flight(t_send, t_sent, reading.failure, connect_s, retries, reading)

    def _connect(self) -> int:
        """Open the connection; return how many tries it took after the first. Raises NotConnected."""
        for retry in range(self._limits.connect_retries + 1):
            try:
                self._sock = self._connected()
            except OSError as error:
                # A pause that is cut short by the end of the cell is followed by no other try.
                last = retry == self._limits.connect_retries
                if last or self._stopping.wait(_FIRST_PAUSE_S * 2**retry):
                    raise NotConnected(error, retry) from error
            else:
                return retry
        raise AssertionError("connect_retries is below 0")

    def _connected(self) -> socket.socket:
        sock = socket.create_connection((self._host, self._port), self._limits.connect_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._host)
            else:
                ask_for_stamps(sock)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    @staticmethod
    def _was_closed(sock: socket.socket) -> bool:
        """Whether the server has closed an idle connection, or sent what nobody asked for (TLS may send tickets)."""
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP | (0 if isinstance(sock, ssl.SSLSocket) else select.POLLIN))
        return bool(poll.poll(0))


def _send_all(sock: socket.socket, request: bytes, deadline: float) -> None:
    """Send on a non-blocking socket; a request that the kernel takes at once costs one call. Raises TimeoutError."""
    left = memoryview(request)
    while left:
        try:
            left = left[sock.send(left) :]
        except (BlockingIOError, ssl.SSLWantWriteError) as full:
            writable = select.poll()
            writable.register(sock, select.POLLOUT)
            if not writable.poll(max(0.0, deadline - time.perf_counter()) * 1e3):
                raise TimeoutError("the server does not take it") from full
