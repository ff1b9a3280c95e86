"""The application on the toy engine in this process, asked without sockets, and what its answers say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI

from ddtree_reference import server
from ddtree_reference.method import Method
from ddtree_reference.service import Service
from ddtree_reference.startup import Opened
from ddtree_reference.worker import Worker

ANSWER_SECONDS = 60
JSON = (("content-type", "application/json"),)
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
PROMPT = "Write a poem"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
TEXT = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
DRAWN = {"temperature": 3, "max_tokens": 40}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def events(self) -> list[dict[str, Any]]:
        return sse_events(self.body)


def sse_events(body: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream's events; the last line must be [DONE]."""
    lines = [line for line in body.split(b"\n\n") if line]
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


class InProcess:
    """An application that runs on an event loop of its own and is asked without sockets."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._lifespan = app.router.lifespan_context(app)

    def __enter__(self) -> InProcess:
        self._thread.start()
        self.run(self._lifespan.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._lifespan.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(ANSWER_SECONDS)

    def post(self, path: str, body: object, leave_after: int | None = None) -> Reply:
        return self.ask("POST", path, json.dumps(body).encode(), leave_after=leave_after)

    def get(self, path: str) -> Reply:
        return self.ask("GET", path)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = JSON,
        leave_after: int | None = None,
    ) -> Reply:
        """The answer; a client may leave after it has received that many pieces. Raises what the application raises."""
        return self.run(self._ask(method, path, body, headers, leave_after))

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Sequence[tuple[str, str]], leave_after: int | None
    ) -> Reply:
        gone, sent, pieces = asyncio.Event(), False, [{}]
        if leave_after == 0:
            self.loop.call_later(0.05, gone.set)

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            pieces.append(message)
            if leave_after is not None and len(pieces) > 1 + leave_after:
                gone.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, receive, send)
        start = next((piece for piece in pieces if piece.get("type") == "http.response.start"), None)
        if start is None:
            return Reply(0, {}, b"")
        named = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
        return Reply(start["status"], named, b"".join(piece.get("body", b"") for piece in pieces))


@contextlib.contextmanager
def in_process(opened: Opened, method: Method, worker: Worker | None = None) -> Iterator[InProcess]:
    """The application of a model, served with `method`; or with another worker than its usual one."""
    worker = worker or Worker(opened.engine, opened.tokenizer, method)
    total = opened.engine.pool.total
    with InProcess(server.create_app(Service(opened, worker, "toy", total, 1, "in process", 0.0))) as served:
        yield served


def chat(api: InProcess, **more: object) -> dict[str, Any]:
    reply = api.post(CHAT_PATH, CHAT | more)
    assert reply.status == 200, reply.body
    return reply.json()


def text(api: InProcess, **more: object) -> dict[str, Any]:
    reply = api.post(TEXT_PATH, TEXT | more)
    assert reply.status == 200, reply.body
    return reply.json()


def contents(body: dict[str, Any]) -> list[str]:
    return [str(choice["message"]["content"]) for choice in body["choices"]]


def error_of(reply: Reply, status: int) -> dict[str, Any]:
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return dict(error)


def counters(api: InProcess) -> dict[str, int]:
    return dict(api.get("/server_info").json()["counters"])


def wait_until_idle(api: InProcess) -> dict[str, int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = counters(api)
        if now["running_requests"] == now["queued_requests"] == 0:
            return now
        time.sleep(0.01)
    pytest.fail(f"still busy: {now}")
