"""An HTTP server that plays a script byte by byte: framed in any way, cut anywhere, refused or silent.

It speaks over plain sockets, since every ready-made server repairs the very faults that are wanted here.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

SSE = "text/event-stream"

Framing = Literal["chunked", "close", "length"]
"""How the end of a body is told: by chunks, by closing the connection, or by a Content-Length."""

Packets = Literal["pieces", "one", "bytes"]
"""What is handed to the kernel at once: a piece of the script, the whole answer, or a single byte."""


@dataclass(frozen=True)
class Script:
    """One answer: its status, and the pieces of its body, each with a pause (s) before it.

    `end` says what happens after the last piece and `end_pause` more seconds: `clean` ends the body as HTTP has it,
    `cut` closes the connection in the middle of it, `reset` does so with a TCP reset, `silence` keeps it open without a
    byte. Without `head` not even the status line is sent. Without a `framing` it is that of `chunked`: chunks or none.
    Each piece is one chunk. Only the packets `pieces` keep the pauses. `keep_alive` false closes the connection after
    the answer. `extension` follows each chunk's size, `trailers` (whole lines) the last chunk, and `trailing` are bytes
    after the answer that belong to none.
    """

    pieces: Sequence[tuple[float, bytes]]
    status: int = 200
    content_type: str = SSE
    chunked: bool = True
    end: Literal["clean", "cut", "reset", "silence"] = "clean"
    head: bool = True
    framing: Framing | None = None
    packets: Packets = "pieces"
    keep_alive: bool = True
    end_pause: float = 0.0
    extension: bytes = b""
    trailers: bytes = b""
    trailing: bytes = b""

    @property
    def framed(self) -> Framing:
        """The framing, by name."""
        return self.framing or ("chunked" if self.chunked else "close")

    def head_bytes(self) -> bytes:
        """Status line and header fields; an answer that is to break off announces more than it sends."""
        if not self.head:
            return b""
        missing = 0 if self.end == "clean" else 1000
        length = sum(len(piece) for _, piece in self.pieces) + missing
        told = {"chunked": ["Transfer-Encoding: chunked"], "length": [f"Content-Length: {length}"], "close": []}
        closes = [] if self.keep_alive and self.framed != "close" else ["Connection: close"]
        lines = [f"HTTP/1.1 {self.status} Scripted", f"Content-Type: {self.content_type}", *told[self.framed], *closes]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()

    def body_packets(self) -> list[tuple[float, bytes]]:
        """The pieces as they are framed, each with the pause before it, without the end of the body."""
        if self.framed != "chunked":
            return list(self.pieces)
        return [(pause, b"%x%s\r\n%s\r\n" % (len(piece), self.extension, piece)) for pause, piece in self.pieces]

    def end_bytes(self) -> bytes:
        """What ends the body, and the bytes after it."""
        if self.end != "clean":
            return b""
        return (b"0\r\n" + self.trailers + b"\r\n" if self.framed == "chunked" else b"") + self.trailing

    def sends(self) -> list[tuple[float, bytes]]:
        """All that is sent, as packets with the pause (s) before each."""
        parts = [(0.0, self.head_bytes()), *self.body_packets(), (0.0, self.end_bytes())]
        if self.packets == "pieces":
            return parts
        whole = b"".join(part for _, part in parts)
        if self.packets == "one":
            return [(0.0, whole)]
        return [(0.0, whole[i : i + 1]) for i in range(len(whole))]


@dataclass(frozen=True)
class Played:
    """What the server did for one request: its JSON body, when it had come in full, and when each packet was sent.

    Moments are seconds of time.perf_counter(), taken just before a packet was handed to the kernel; with the packets
    `pieces` the first is that of the head and the last that of the body's end.
    """

    body: dict[str, Any]
    received: float
    sent: list[float] = field(default_factory=list)


def event(payload: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"


DONE = event(b"[DONE]")


def chunk(finish: str | None = None, usage: Any = ..., **delta: Any) -> bytes:
    """A chat chunk; `usage` is left out unless given."""
    payload: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return event(payload if usage is ... else payload | {"usage": usage})


def usage(completion: int, prompt: int = 5, cached: int | None = None) -> dict[str, Any]:
    """A usage object."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion} | details


def usage_event(completion: int, spec: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """The usage event before [DONE]."""
    extra = {} if spec is None else {"sglext": {"spec_tokens_details": spec}}
    return event({"choices": [], "usage": usage(completion, **fields)} | extra)


def stream(*events: bytes, **fields: Any) -> Script:
    """A script that sends each event at once, one after another."""
    return Script([(0.0, one) for one in events], **fields)


def words(n: int) -> Script:
    """A regular answer of n tokens, one a word and an event."""
    texts = [chunk(content=f"w{i} ", usage=usage(i + 1)) for i in range(n)]
    return stream(chunk(role="assistant", content=""), *texts, chunk(finish="length"), usage_event(n), DONE)


def prompt_of(body: dict[str, Any]) -> str:
    """The text that a request asks with, on either endpoint."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def by_number(scripts: Sequence[Script]) -> Callable[[dict[str, Any]], Script]:
    """Answers by the number that ends the prompt; the last script answers all numbers beyond."""
    return lambda body: scripts[min(int(prompt_of(body).split()[-1]), len(scripts) - 1)]


class ScriptedServer:
    """Serves on a port of the loopback until closed, a free one by default; `answer` maps a JSON body to its script.

    At most `most` connections are accepted, then the listener closes. `requests` holds the bodies in the order they
    came, `headers` their header fields, and `played` what was done for each; `connections` counts what was accepted,
    `most_in_flight` the most requests that were being answered at once. Of these `admits` run and the others queue, as
    `counters` of its /server_info tells. Every GET is answered with that and with `info`.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Script],
        admits: int = 1000,
        info: Mapping[str, Any] | None = None,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        most: int | None = None,
    ) -> None:
        self._most = most
        self._tls = tls
        self._answer = answer
        self._info = dict(info or {})
        self._admitted = threading.Semaphore(admits)
        self._running = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._in_flight = 0
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.played: list[Played] = []
        self.connections = 0
        self.most_in_flight = 0
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # Packets are to leave as they are written, not gathered until the last was acknowledged.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._most is not None and self.connections >= self._most:
                connection.close()
                self._listener.close()
                return
            if self._tls:
                try:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                except OSError:
                    continue
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # The client may leave at any moment: that is what some of the tests are about.
        with connection, connection.makefile("rb") as reader, suppress(OSError):
            while head := reader.readline():
                method, path, _ = head.decode().split()
                fields = {}
                while (line := reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    fields[name.lower()] = value.strip()
                body = reader.read(int(fields.get("content-length", 0)))
                if method == "GET":
                    answer = json.dumps({"data": [], "counters": self.counters()} | self._info).encode()
                    self._play(connection, Script([(0, answer)], content_type="application/json"), [])
                    continue
                self.headers.append(fields)
                if not self._take(connection, path, json.loads(body or b"{}")):
                    return

    def _take(self, connection: socket.socket, path: str, body: dict[str, Any]) -> bool:
        """Answer a request; return whether the connection can take another."""
        played = Played(body, time.perf_counter())
        with self._lock:
            self.requests.append(body)
            self.paths.append(path)
            self.played.append(played)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return self._run(connection, played)
        finally:
            with self._lock:
                self._in_flight -= 1

    def counters(self) -> dict[str, int]:
        """Requests that run and that queue."""
        with self._lock:
            return {"running_requests": self._running, "queued_requests": self._in_flight - self._running}

    def _run(self, connection: socket.socket, played: Played) -> bool:
        with self._admitted:
            with self._lock:
                self._running += 1
            try:
                return self._play(connection, self._answer(played.body), played.sent)
            finally:
                with self._lock:
                    self._running -= 1

    def _play(self, connection: socket.socket, script: Script, sent: list[float]) -> bool:
        """Send an answer, note when; return whether the connection can take another request."""
        for pause, packet in script.sends():
            if pause and self._closing.wait(pause):
                return False
            sent.append(time.perf_counter())
            connection.sendall(packet)
        if script.end_pause and self._closing.wait(script.end_pause):
            return False
        if script.end == "silence":
            self._closing.wait()
        elif script.end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return script.end == "clean" and script.framed != "close" and script.keep_alive


def scheduled(script: Script) -> list[float]:
    """When each piece would be sent by a server and a network that take no time, s from the request."""
    return list(accumulate(pause for pause, _ in script.pieces))
