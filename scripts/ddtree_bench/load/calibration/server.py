"""The scripted server: it answers every request by one schedule, in one thread, and stamps what it does.

    python -m ddtree_bench.load.calibration.server [--port 0] [--ttft-ms 100] [--interval-ms 20] [--events 100]

It prints its base URL and serves until it is ended. POST /v1/chat/completions streams, GET /v1/models answers, and
GET /stamps returns the stamps of the requests since it was last asked, by the digest of their prompts, and its own CPU
time. All moments are seconds of time.perf_counter(), which the processes of one Linux host share.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import heapq
import json
import re
import select
import selectors
import signal
import socket
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from ddtree_bench.load.calibration.schedule import Schedule

_SO_TIMESTAMPNS = 35
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_READ_AT_ONCE = 65536


class _Stream:
    """One answer under way: where it goes, when its first part is due, and the moments its parts were sent."""

    __slots__ = ("arrived", "connection", "read", "sends")

    def __init__(self, connection: _Connection, arrived: float, read: float) -> None:
        self.connection = connection
        self.arrived = arrived
        self.read = read
        self.sends = array("d")


class _Connection:
    """A client's connection: bytes of a request that is not complete yet, and bytes that the kernel did not take."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.backlog = bytearray()
        self.closed = False


class CalibrationServer:
    """Listens on the loopback; `serve` runs until the process ends, or standard input does if it is followed."""

    def __init__(self, schedule: Schedule, port: int = 0) -> None:
        self._schedule = schedule
        self._parts = schedule.parts()
        self._streams: dict[str, _Stream] = {}
        self._due: list[tuple[float, int, _Stream]] = []
        self._order = count()
        self._ended = False
        # The first descriptor that is opened, since select() takes none above 1023.
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def follow(self, stream: Any) -> None:
        """End when `stream` does: whoever holds its other end is gone then."""
        self._selector.register(stream, selectors.EVENT_READ, lambda: self._look_at(stream))

    def _look_at(self, stream: Any) -> None:
        self._ended = not stream.read1(_READ_AT_ONCE)

    def serve(self) -> None:
        """Serve; a part is sent as soon as it is due, and reading waits for that."""
        # select() waits to the microsecond, where epoll and poll round up to the next millisecond.
        waiting_on = [self._selector.fileno()]
        while not self._ended:
            self._send_due()
            timeout = max(0.0, self._due[0][0] - time.perf_counter()) if self._due else None
            ready, _, _ = select.select(waiting_on, [], [], timeout)
            if ready:
                for key, _ in self._selector.select(0):
                    key.data()

    def _send_due(self) -> None:
        due, clock, interval, last = self._due, time.perf_counter, self._schedule.interval_s, len(self._parts) - 1
        while due and due[0][0] <= clock():
            moment, order, stream = due[0]
            sends = stream.sends
            part = self._parts[len(sends)]
            sends.append(clock())
            self._send(stream.connection, part)
            if len(sends) > last or stream.connection.closed:
                heapq.heappop(due)
            else:
                # What ends the stream is due with its last event.
                next_moment = moment + interval if len(sends) < last else moment
                heapq.heapreplace(due, (next_moment, order, stream))

    def _send(self, connection: _Connection, part: bytes) -> None:
        if connection.backlog:
            connection.backlog += part
            return
        try:
            sent = connection.sock.send(part)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        if sent < len(part):
            connection.backlog += part[sent:]
            self._watch(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _ask_for_stamps(sock)
        connection = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, self._handler(connection))

    def _handler(self, connection: _Connection) -> Callable[[], None]:
        return lambda: self._exchange(connection)

    def _watch(self, connection: _Connection, events: int) -> None:
        self._selector.modify(connection.sock, events, self._handler(connection))

    def _close(self, connection: _Connection) -> None:
        if not connection.closed:
            connection.closed = True
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _exchange(self, connection: _Connection) -> None:
        """What can be done on a connection now: send what it kept waiting, and take what came."""
        try:
            if connection.backlog:
                self._flush(connection)
            piece, ancillary, _, _ = connection.sock.recvmsg(_READ_AT_ONCE, socket.CMSG_SPACE(16))
        except BlockingIOError:
            return
        except OSError:
            piece, ancillary = b"", []
        now = time.perf_counter()
        if not piece:
            self._close(connection)
            return
        connection.received += piece
        if (request := _complete(connection.received)) is not None:
            connection.received = b""
            self._answer(connection, *request, _arrival(ancillary, now), now)

    def _flush(self, connection: _Connection) -> None:
        del connection.backlog[: connection.sock.send(connection.backlog)]
        if not connection.backlog:
            self._watch(connection, selectors.EVENT_READ)

    def _answer(self, connection: _Connection, target: bytes, body: bytes, arrived: float, read: float) -> None:
        if target == b"POST /v1/chat/completions":
            stream = _Stream(connection, arrived, read)
            heapq.heappush(self._due, (arrived + self._schedule.ttft_s, next(self._order), stream))
            self._streams[_prompt_digest(body)] = stream
        elif target == b"GET /v1/models":
            self._send_json(connection, {"object": "list", "data": [{"id": "calibration", "object": "model"}]})
        elif target == b"GET /stamps":
            self._send_json(connection, self._stamps())
        else:
            self._send_json(connection, {"error": {"message": "no such path"}}, status=b"404 Not Found")

    def _send_json(self, connection: _Connection, content: Any, status: bytes = b"200 OK") -> None:
        body = json.dumps(content).encode()
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self._send(connection, head + body)

    def _stamps(self) -> dict[str, Any]:
        streams, self._streams = self._streams, {}
        stamps = {
            digest: {"arrived": stream.arrived, "read": stream.read, "sends": list(stream.sends)}
            for digest, stream in streams.items()
        }
        return {"cpu_s": time.process_time(), "requests": stamps}


def _complete(received: bytes) -> tuple[bytes, bytes] | None:
    """Method and path, and the body, of a request; None as long as it is not complete."""
    head, end, body = received.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    if not end or (length and len(body) < int(length[1])):
        return None
    return b" ".join(head.split(b" ", 2)[:2]), body


def _prompt_digest(body: bytes) -> str:
    return hashlib.sha256(json.loads(body)["messages"][-1]["content"].encode()).hexdigest()


def _ask_for_stamps(sock: socket.socket) -> None:
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def _arrival(ancillary: Sequence[tuple[int, int, bytes]], now: float) -> float:
    """When the kernel received the last bytes that were read at `now`; that moment itself where it does not say."""
    if not ancillary:
        return now
    seconds, nanoseconds = array("q", ancillary[0][2])
    tries = []
    for _ in range(3):
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        tries.append((after - before, wall - (before + after) // 2))
    return min(now, (seconds * 1_000_000_000 + nanoseconds - min(tries)[1]) / 1e9)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until ended; the exit status is 0 when the end came through standard input."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_bench.load.calibration.server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--ttft-ms", type=float, default=100.0, help="time to the first event")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between events")
    parser.add_argument("--events", type=int, default=100, help="token-bearing events of an answer")
    parser.add_argument("--tokens-per-event", type=int, default=1, help="tokens of each")
    parser.add_argument("--follow-stdin", action="store_true", help="end when standard input does")
    parsed = parser.parse_args(arguments)
    schedule = Schedule(parsed.ttft_ms / 1e3, parsed.interval_ms / 1e3, parsed.events, parsed.tokens_per_event)
    server = CalibrationServer(schedule, parsed.port)
    if parsed.follow_stdin:
        server.follow(sys.stdin.buffer)
        # Ctrl-C in a terminal reaches this process too; who started it decides when it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(server.url, flush=True)
    # A collection would make the stream late.
    gc.disable()
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
