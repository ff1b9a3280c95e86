"""An HTTP server that answers exactly as a test says: byte by byte, chunked or not, cut, refused or silent.

It speaks over plain sockets, since every ready-made server repairs the very faults that are wanted here.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

SSE = "text/event-stream"


@dataclass(frozen=True)
class Script:
    """One answer: its status, and the pieces of its body, each with a pause (s) before it.

    `end` says what happens after the last piece: `clean` ends the body as HTTP has it, `cut` closes the connection in
    the middle of it, `reset` does so with a TCP reset, `silence` keeps it open without a byte. Without `head` not even
    the status line is sent.
    """

    pieces: Sequence[tuple[float, bytes]]
    status: int = 200
    content_type: str = SSE
    chunked: bool = True
    end: Literal["clean", "cut", "reset", "silence"] = "clean"
    head: bool = True


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


class ScriptedServer:
    """Serves on a free port of the loopback until closed; `answer` maps a request's JSON body to its script.

    `requests` holds the bodies in the order they came, `connections` counts what was accepted, `most_in_flight` the
    most requests that were being answered at once. Of these `admits` run and the others queue, as `counters` of its
    /server_info tells.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Script], admits: int = 1000) -> None:
        self._answer = answer
        self._admitted = threading.Semaphore(admits)
        self._running = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._in_flight = 0
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.connections = 0
        self.most_in_flight = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
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
                length = 0
                while (line := reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = reader.read(length)
                if method == "GET":
                    body = json.dumps({"data": [], "counters": self.counters()}).encode()
                    self._send(connection, Script([(0, body)], content_type="application/json"))
                    continue
                with self._lock:
                    self.requests.append(json.loads(body))
                    self.paths.append(path)
                    self._in_flight += 1
                    self.most_in_flight = max(self.most_in_flight, self._in_flight)
                try:
                    if not self._run(connection, json.loads(body)):
                        return
                finally:
                    with self._lock:
                        self._in_flight -= 1

    def counters(self) -> dict[str, int]:
        """Requests that run and that queue."""
        with self._lock:
            return {"running_requests": self._running, "queued_requests": self._in_flight - self._running}

    def _run(self, connection: socket.socket, body: dict[str, Any]) -> bool:
        with self._admitted:
            with self._lock:
                self._running += 1
            try:
                return self._send(connection, self._answer(body))
            finally:
                with self._lock:
                    self._running -= 1

    def _send(self, connection: socket.socket, script: Script) -> bool:
        """Send an answer; return whether the connection can take another request."""
        framing = "Transfer-Encoding: chunked" if script.chunked else "Connection: close"
        head = f"HTTP/1.1 {script.status} Scripted\r\nContent-Type: {script.content_type}\r\n{framing}\r\n\r\n"
        connection.sendall(head.encode() if script.head else b"")
        for pause, piece in script.pieces:
            if pause and self._closing.wait(pause):
                return False
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if script.chunked else piece)
        if script.end == "silence":
            self._closing.wait()
        elif script.end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif script.end == "clean" and script.chunked:
            connection.sendall(b"0\r\n\r\n")
            return True
        return False
