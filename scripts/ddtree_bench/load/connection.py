"""One user's connection to the server: it connects, sends, and hands the answer to the reading thread."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import threading
import time
from array import array
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ddtree_bench.load.exchange import Exchange, Failure, Limits
from ddtree_bench.load.reader import Reader, Reading, ask_for_stamps

_FIRST_PAUSE_S = 0.1
_SLICE_S = 0.1
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
    send_blocked_s: float = 0.0

    def exchange(self, reader: Reader) -> Exchange:
        """Return the raw record; worked out after the measurement, since it costs time a read."""
        reading = self.reading
        lags = reader.lags(reading) if reading else array("d")
        ended = reading is not None and self.failure is None and bool(lags)
        return Exchange(
            t_send=self.t_send,
            t_sent=self.t_sent,
            t_end=reading.t_end if reading else self.t_sent,
            times=array("d", [time for time, _, _ in reading.reads] if reading else []),
            lags=lags,
            pieces=[piece for _, piece, _ in reading.reads] if reading else [],
            failure=self.failure,
            connect_s=self.connect_s,
            retries=self.retries,
            end_lag=lags[-1] if ended else math.nan,
            send_blocked_s=self.send_blocked_s,
        )


class NotConnected(OSError):
    """No connection within the tries that are allowed; `retries` were made after the first."""

    def __init__(self, error: OSError, retries: int) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.errno = error.errno
        self.retries = retries


class Stopping(OSError):
    """The cell ended while a connection was waited for."""


@dataclass(frozen=True)
class Opened:
    """How opening a connection went: the error if there is none, and the tries after the first."""

    error: str | None
    retries: int


def tls_context(base_url: str) -> ssl.SSLContext | None:
    """Return what checks the server's certificate and name, one for all users: making it takes time; None for http."""
    return ssl.create_default_context() if urlsplit(base_url).scheme == "https" else None


class Connection:
    """One request at a time over one connection that is kept open; `stopping` ends every wait but that for answers."""

    def __init__(
        self,
        base_url: str,
        limits: Limits,
        reader: Reader,
        stopping: threading.Event,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        url = urlsplit(base_url)
        self._host, self._port = url.hostname or "", url.port or _PORTS[url.scheme]
        self._tls = tls
        self._limits = limits
        self._reader = reader
        self._stopping = stopping
        self._sock: socket.socket | None = None

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def open(self) -> Opened:
        """Connect before the clock runs.

        Without this the first wave of requests pays for its connections. An error is not raised: the requests that
        follow meet it themselves and record it.
        """
        try:
            return Opened(None, self._connect())
        except NotConnected as error:
            return Opened(str(error), error.retries)

    def ask(self, request: bytes) -> Flight | None:
        """Send one request and wait for the end of its answer; None when the cell ended before it was sent.

        Every way to fail is in the result, none is raised, but for a lack of file descriptors: that is the client's.
        """
        connect_s, retries = None, 0
        if self._sock is None or self._was_closed(self._sock):
            self.close()
            begun = time.perf_counter()
            try:
                retries = self._connect()
            except NotConnected as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                now = time.perf_counter()
                failure = Failure("connect_error", f"no connection to {self._host}:{self._port}: {error}")
                unsent = Flight(now, now, failure, now - begun, error.retries)
                return None if self._stopping.is_set() else unsent
            connect_s = time.perf_counter() - begun
        if self._stopping.is_set():
            return None
        assert self._sock is not None
        return self._send(self._sock, request, connect_s, retries)

    def _send(self, sock: socket.socket, request: bytes, connect_s: float | None, retries: int) -> Flight:
        t_send = time.perf_counter()
        try:
            blocked_s = self._send_all(sock, request, t_send + min(self._limits.idle_s, self._limits.request_s))
            t_sent = time.perf_counter()
        except OSError as error:
            now = time.perf_counter()
            self.close()
            return Flight(t_send, now, self._unsent(error), connect_s, retries)
        reading = self._reader.begin(sock, t_sent, self._limits)
        reading.wait()
        if not reading.reusable:
            self.close()
        return Flight(t_send, t_sent, reading.failure, connect_s, retries, reading, blocked_s)

    def _unsent(self, error: OSError) -> Failure:
        if isinstance(error, Stopping):
            return self._reader.stopped or Failure("truncated", "interrupted: the cell ended")
        status = "timeout" if isinstance(error, TimeoutError) else "connect_error"
        return Failure(status, f"the request could not be sent: {error}")

    def _send_all(self, sock: socket.socket, request: bytes, deadline: float) -> float:
        """Send on a non-blocking socket; return the time for which the kernel took no more, s."""
        left, blocked_s = memoryview(request), 0.0
        while left:
            try:
                left = left[sock.send(left) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                since = time.perf_counter()
                self._wait(sock, select.POLLOUT, deadline, "the server does not take the request")
                blocked_s += time.perf_counter() - since
        return blocked_s

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
        """Connect to the first address of the host that can be reached, all of them within one limit."""
        deadline = time.perf_counter() + self._limits.connect_s
        failed: OSError = ConnectionError(f"{self._host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                return self._reach(sock, address, deadline)
            except OSError as error:
                sock.close()
                failed = error
            except BaseException:
                sock.close()
                raise
        raise failed

    def _reach(self, sock: socket.socket, address: Any, deadline: float) -> socket.socket:
        sock.setblocking(False)
        status = sock.connect_ex(address)
        if status == errno.EINPROGRESS:
            self._wait(sock, select.POLLOUT, deadline, "not connected in time")
            status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, os.strerror(status))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            ask_for_stamps(sock)
            return sock
        return self._shaken(
            self._tls.wrap_socket(sock, server_hostname=self._host, do_handshake_on_connect=False), deadline
        )

    def _shaken(self, sock: ssl.SSLSocket, deadline: float) -> ssl.SSLSocket:
        """The socket after TLS's handshake."""
        try:
            while True:
                try:
                    sock.do_handshake()
                except ssl.SSLWantReadError:
                    self._wait(sock, select.POLLIN, deadline, "no TLS handshake in time")
                except ssl.SSLWantWriteError:
                    self._wait(sock, select.POLLOUT, deadline, "no TLS handshake in time")
                else:
                    return sock
        except BaseException:
            sock.close()
            raise

    def _wait(self, sock: socket.socket, event: int, deadline: float, overdue: str) -> None:
        """Wait for an event of a socket; raises TimeoutError at the deadline, Stopping when the cell ends."""
        poll = select.poll()
        poll.register(sock, event)
        while True:
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                raise TimeoutError(overdue)
            if self._stopping.is_set():
                raise Stopping("the cell ended")
            if poll.poll(min(remaining, _SLICE_S) * 1e3):
                return

    @staticmethod
    def _was_closed(sock: socket.socket) -> bool:
        """Whether the server has closed an idle connection, or sent what nobody asked for (TLS may send tickets)."""
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP | (0 if isinstance(sock, ssl.SSLSocket) else select.POLLIN))
        return bool(poll.poll(0))
