"""The reading thread: it waits for bytes on all connections at once, stamps them, and does nothing else with them.

One thread for all streams, because a thread each would have to be woken for every event and then wait for the
interpreter's lock: the stamp would say when its turn came. How late the stamps are all the same is recorded: the kernel
stamps what it receives (SO_TIMESTAMPNS), and the difference is kept with every read.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from ddtree_bench.load.client_record import Scheduling, scheduling
from ddtree_bench.load.exchange import Failure, Limits
from ddtree_bench.load.wire import AnswerEnd, WireError

SWEEP_S = 0.1
"""How often limits of time are looked at."""

_SO_TIMESTAMPNS = 35
_STAMP = struct.Struct("=qq")
_ANCILLARY = socket.CMSG_SPACE(_STAMP.size)
_PIECE = 65536

_LOOK_EACH = 64
_STEPPED_NS = 100_000

RECENT = 3
"""Reads at the end of an answer that a look at it while it comes is content with: usage comes with every event or last.
"""


Receive = Callable[[int, int], tuple[bytes, list[tuple[int, int, bytes]], int, Any]]
"""socket.recvmsg, or what stands in for it: at most so many bytes, with so much ancillary data."""


class Reading:
    """An answer that is being read; it belongs to the reading thread until `wait` returns.

    `reads` holds (moment, bytes, the kernel's stamp or nothing) of every read.
    """

    def __init__(self, sock: socket.socket, t_sent: float, limits: Limits) -> None:
        self.receive: Receive = partial(_receive_tls, sock) if isinstance(sock, ssl.SSLSocket) else sock.recvmsg
        self.reads: list[tuple[float, bytes, bytes]] = []
        self.end = AnswerEnd()
        self.in_chunks = False
        self.failure: Failure | None = None
        self.t_sent = self.t_end = t_sent
        self.idle_s = limits.idle_s
        self.request_s = limits.request_s
        # Held until the answer has ended: a bare lock wakes its waiter with a quarter of an Event's work.
        self._ended = threading.Lock()
        self._ended.acquire()

    def wait(self) -> None:
        """Return when the answer has ended; once only."""
        self._ended.acquire()

    def end_at(self, moment: float, failure: Failure | None) -> None:
        """Let `wait` return; called by the reading thread."""
        self.t_end, self.failure = moment, failure
        self._ended.release()

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request."""
        return self.failure is None and self.end.keeps_connection

    @property
    def recent(self) -> list[bytes]:
        """The bytes of the last reads, for a look at an answer in flight."""
        return [piece for _, piece, _ in self.reads[-RECENT:]]


class Reader:
    """The reading thread; runs while its context is open.

    `stop` ends every answer in flight, and all that are begun later, with one failure.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readings: dict[int, tuple[Receive, list[tuple[float, bytes, bytes]], Reading]] = {}
        self._changing = threading.Lock()
        self._closing = False
        self.stopped: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._offset_ns = _clock_offset_ns()
        self._over = False
        self.scheduling: Scheduling | None = None

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing = True
        self._thread.join()
        self._epoll.close()

    @property
    def clock_stepped(self) -> bool:
        """Whether the clock of the kernel's stamps was set while the thread ran: lags then mean nothing."""
        return abs(_clock_offset_ns() - self._offset_ns) > _STEPPED_NS

    def begin(self, sock: socket.socket, t_sent: float, limits: Limits) -> Reading:
        """Read the answer that comes on `sock`, a non-blocking socket whose request was sent at `t_sent`."""
        reading = Reading(sock, t_sent, limits)
        with self._changing:
            if self._thread.is_alive() and not self._over:
                self._readings[sock.fileno()] = reading.receive, reading.reads, reading
                self._epoll.register(sock.fileno(), select.EPOLLIN)
                return reading
        reading.end_at(t_sent, self.stopped or Failure("truncated", "the reading thread has ended"))
        return reading

    def stop(self, failure: Failure) -> None:
        """End what is in flight at the next sweep, and everything that is begun after it."""
        self.stopped = failure

    def in_flight(self) -> list[Reading]:
        """The answers that are being read now."""
        return [reading for _, _, reading in list(self._readings.values())]

    def lags(self, reading: Reading) -> array[float]:
        """Return for every read of an answer how long its bytes had lain in the kernel, s, NaN where it is unknown."""
        lags = array("d")
        for now, _, stamp in reading.reads:
            seconds, nanoseconds = _STAMP.unpack(stamp) if stamp else (0, 0)
            arrived_ns = seconds * 1_000_000_000 + nanoseconds - self._offset_ns
            lags.append(now - arrived_ns / 1e9 if stamp else math.nan)
        return lags

    def _run(self) -> None:
        before = scheduling()
        try:
            self._serve()
        finally:
            # Nobody must wait for an answer that nothing reads any more, whatever ended the loop.
            self.stopped = self.stopped or Failure("truncated", "the reading thread has ended")
            with self._changing:
                self._over = True
            self._sweep(time.perf_counter())
        after = scheduling()
        self.scheduling = after - before if after and before else None

    def _serve(self) -> None:
        """The loop in which every microsecond counts: it runs once a read of any answer."""
        poll, readings, clock = self._epoll.poll, self._readings, time.perf_counter
        next_sweep = 0.0
        while not self._closing:
            for fd, _ in poll(SWEEP_S):
                receive, reads, reading = readings[fd]
                try:
                    piece, stamp, _, _ = receive(_PIECE, _ANCILLARY)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    continue
                except OSError as error:
                    self._finish(fd, reading, clock(), _broken_off(reading, str(error)))
                    continue
                now = clock()
                reads.append((now, piece, stamp[0][2] if stamp else b""))
                # Nothing else than an empty line ends a chunked body; now and then it is looked through all the same,
                # so that the end of a long answer does not keep the others waiting.
                if piece[-4:] != b"\r\n\r\n" and reading.in_chunks and len(piece) > 3 and len(reads) % _LOOK_EACH:
                    continue
                self._look_for_the_end(fd, reading, now, piece)
            if clock() >= next_sweep:
                self._sweep(clock())
                next_sweep = clock() + SWEEP_S

    def _look_for_the_end(self, fd: int, reading: Reading, now: float, piece: bytes) -> None:
        if not piece:
            reading.reads.pop()
            failure = None if reading.end.ends_with_connection else _broken_off(reading, "closed before its end")
            self._finish(fd, reading, now, failure)
            return
        try:
            if reading.end.reached(reading.reads):
                self._finish(fd, reading, now, None)
        except WireError as error:
            self._finish(fd, reading, now, Failure("truncated", str(error)))
        reading.in_chunks = reading.end.head is not None and reading.end.head.chunked

    def _finish(self, fd: int, reading: Reading, now: float, failure: Failure | None) -> None:
        with self._changing:
            self._epoll.unregister(fd)
            del self._readings[fd]
        reading.end_at(now, failure)

    def _sweep(self, now: float) -> None:
        for fd, (_, _, reading) in list(self._readings.items()):
            if failure := self.stopped or _overdue(reading, now):
                self._finish(fd, reading, now, failure)
            elif reading.end.seen < len(reading.reads) and now - reading.reads[-1][0] > SWEEP_S:
                # The last chunk may have come with bytes behind it that belong to no answer.
                self._look_for_the_end(fd, reading, *reading.reads[-1][:2])


def _receive_tls(sock: ssl.SSLSocket, most: int, _ancillary: int) -> tuple[bytes, list[Any], int, Any]:
    """Without stamps: the kernel's are those of TLS records, not of what they carry."""
    piece = sock.recv(most)
    # What is decrypted already does not wake the loop again; what goes wrong behind it is met by the next read.
    with suppress(OSError):
        while more := sock.pending():
            piece += sock.recv(more)
    return piece, [], 0, None


def _broken_off(reading: Reading, why: str) -> Failure:
    if not reading.reads:
        return Failure("connect_error", f"the connection broke off before any answer: {why}")
    return Failure("truncated", f"the connection broke off: {why}")


def _overdue(reading: Reading, now: float) -> Failure | None:
    if now - reading.t_sent > reading.request_s:
        return Failure("timeout", f"not answered within {reading.request_s:g} s")
    last = reading.reads[-1][0] if reading.reads else reading.t_sent
    if now - last > reading.idle_s:
        return Failure("timeout", f"no byte came for {reading.idle_s:g} s")
    return None


def ask_for_stamps(sock: socket.socket) -> None:
    """Let the kernel stamp what the socket receives; a kernel that cannot leaves the lags unknown."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return


def _clock_offset_ns() -> int:
    """The wall clock less the clock of the stamps, ns: the least disturbed of some tries."""
    tries = []
    for _ in range(20):
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]
