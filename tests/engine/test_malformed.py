"""Every request, however malformed, gets an answer or a 4xx error object, and the engine goes on answering."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_client import CHAT, CHAT_PATH, InProcess, chat, contents, error_of, in_process, wait_until_idle
from hypothesis import HealthCheck, given, settings
from malformed_strategies import Request, complaint, requests

from ddtree_reference.method import Method
from ddtree_reference.startup import Opened


@pytest.fixture(scope="module")
def api(toy: Opened) -> Iterator[InProcess]:
    with in_process(toy, Method("DDTREE", budget=4)) as served:
        yield served


@settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_every_answer_is_whole_or_an_error_object(api: InProcess, request: Request) -> None:
    reply = api.ask(request.method, request.path, request.body, request.headers)
    assert complaint(reply.status, reply.headers, reply.body) is None, reply


def test_the_engine_answers_as_before(api: InProcess) -> None:
    wait_until_idle(api)
    before = contents(chat(api))
    for body in (b"\xff" * 100, b"[" * 10_000, b'{"messages": 5}'):
        error_of(api.ask("POST", CHAT_PATH, body), 400)
    assert contents(chat(api)) == before
    assert api.post(CHAT_PATH, CHAT | {"stream": True}).events()


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (500, "application/json", b'{"error": {"message": "m", "type": "t", "param": null, "code": 500}}'),
        (400, "application/json", b'{"error": {"message": "m", "type": "t", "param": null, "code": 404}}'),
        (400, "application/json", b'{"error": {"message": "", "type": "t", "param": null, "code": 400}}'),
        (400, "application/json", b'{"error": {"message": "m"}}'),
        (404, "text/plain", b"Not Found"),
        (200, "application/json", b'{"detail": 1}'),
        (200, "text/event-stream", b'data: {"choices": []}\n\n'),
        (200, "text/event-stream", b'data: {"error": {}}\n\ndata: [DONE]\n\n'),
    ],
)
def test_what_counts_as_a_bad_answer(status: int, kind: str, body: bytes) -> None:
    assert complaint(status, {"content-type": kind}, body) is not None
