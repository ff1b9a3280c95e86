from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import uvicorn
from engine_server import chat_ids, free_port

from ddtree_reference import decode, server, startup
from ddtree_reference.answer import Answer, Update
from ddtree_reference.decode import Round
from ddtree_reference.fault import Fault
from ddtree_reference.method import Method
from ddtree_reference.sequence import Request
from ddtree_reference.service import Service
from ddtree_reference.startup import Opened
from ddtree_reference.worker import Job, QueueFull, Worker

SECONDS = 30


@pytest.fixture
def worker(toy: Opened) -> Iterator[Worker]:
    worker = Worker(toy.engine, toy.tokenizer, Method("DDTREE"), fault=Fault("raise", "forbidden"))
    worker.start()
    yield worker
    worker.stop()


def job(toy: Opened, prompt: str, emit: Callable[[Update], None]) -> Job:
    return Job(prompt, tuple(chat_ids(toy, prompt)), 40, None, (), emit)


def answer(toy: Opened, worker: Worker, prompt: str) -> list[Update]:
    """All updates of a request; fails if the last one does not come."""
    updates: queue.Queue[Update] = queue.Queue()
    worker.submit(job(toy, prompt, updates.put))
    heard = [updates.get(timeout=SECONDS)]
    while not heard[-1].last:
        heard.append(updates.get(timeout=SECONDS))
    return heard


def test_an_engine_that_raises_fails_one_request_only(
    toy: Opened, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    *spoken, last = answer(toy, worker, "a forbidden question")
    assert spoken and all(update.text for update in spoken)
    assert last.error == "RuntimeError: DDTREE_REFERENCE_FAULT: raise on a prompt that contains 'forbidden'"
    assert "request failed" in caplog.text
    after = answer(toy, worker, "hello")
    assert after[-1].error is None and after[-1].completion_tokens == 40


@pytest.mark.parametrize("last_only", [True, False])
def test_an_emit_that_raises_fails_one_request_only(toy: Opened, worker: Worker, last_only: bool) -> None:
    def deaf(update: Update) -> None:
        if update.last or not last_only:
            raise RuntimeError("Event loop is closed")

    worker.submit(job(toy, "hello", deaf))
    assert answer(toy, worker, "hello")[-1].completion_tokens == 40
    assert worker.alive
    assert worker.snapshot()["running_requests"] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread's death is the point
def test_a_server_whose_engine_thread_is_dead_says_so() -> None:
    toy = startup.open_engine("toy", "auto", [Method()])  # the dead thread never gives its region back
    worker = Worker(toy.engine, toy.tokenizer, Method(), 1)
    port = free_port()
    app = server.create_app(Service(toy, worker, "toy", 1, 1, "start", 0.0))
    http = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1))
    serving = threading.Thread(target=http.run, daemon=True)
    serving.start()
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: http.started)
        assert requests.get(url + "/health", timeout=SECONDS).status_code == 200

        def end_thread(_: Update) -> None:
            raise SystemExit

        worker.submit(job(toy, "hello", end_thread))
        wait_for(lambda: not worker.alive)
        for response in (
            requests.get(url + "/health", timeout=SECONDS),
            requests.post(url + "/v1/completions", json={"prompt": "hello"}, timeout=SECONDS),
        ):
            assert response.status_code == 503
            assert "engine thread has ended" in response.json()["error"]["message"]
    finally:
        http.should_exit = True
        serving.join(SECONDS)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def test_requests_beyond_the_queue_are_refused(toy: Opened) -> None:
    worker = Worker(toy.engine, toy.tokenizer, Method(), max_queued_requests=2)
    fitting = toy.engine.pool.total + 2
    for _ in range(fitting):
        worker.submit(job(toy, "hello", lambda _: None))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        worker.submit(job(toy, "hello", lambda _: None))
    assert worker.snapshot()["queued_requests"] == worker.snapshot()["requests_total"] == fitting
    assert not worker.flush_cache(), "requests wait"
    worker.start()
    wait_for(lambda: worker.snapshot()["queued_requests"] == worker.snapshot()["running_requests"] == 0)
    assert worker.flush_cache()
    worker.stop()


def test_a_cancelled_request_leaves_and_is_counted_whether_it_ran_or_waited(toy: Opened) -> None:
    worker = Worker(toy.engine, toy.tokenizer, Method())
    heard: list[Update] = []
    jobs = [Job("x", (65, 66), 1500, None, (), heard.append) for _ in range(toy.engine.pool.total + 1)]
    for one in jobs:
        worker.submit(one)
    jobs[-1].cancelled.set()
    worker.start()
    wait_for(lambda: worker.snapshot()["running_requests"] == toy.engine.pool.total)
    wait_for(lambda: worker.snapshot()["kv_tokens_used"] > 0)
    for one in jobs:
        one.cancelled.set()
    wait_for(lambda: worker.snapshot()["aborted_requests_total"] == len(jobs))
    spoken = len(heard)
    assert answer(toy, worker, "hello")[-1].completion_tokens == 40
    assert len(heard) == spoken and not any(update.last for update in heard)
    counters = worker.snapshot()
    assert counters["running_requests"] == counters["queued_requests"] == counters["kv_tokens_used"] == 0
    worker.stop()
    assert toy.engine.pool.free == toy.engine.pool.total


def test_stopping_tells_those_that_run_and_wait(toy: Opened) -> None:
    worker = Worker(toy.engine, toy.tokenizer, Method())
    ends: queue.Queue[Update] = queue.Queue()
    count = toy.engine.pool.total + 2
    for _ in range(count):
        worker.submit(Job("x", (65, 66), 1500, None, (), lambda update: ends.put(update) if update.last else None))
    worker.start()
    wait_for(lambda: worker.snapshot()["generation_tokens_total"] > 0)
    worker.stop(SECONDS)
    assert not worker.alive
    assert [ends.get(timeout=1).error for _ in range(count)] == ["the server is shutting down"] * count
    assert toy.engine.pool.free == toy.engine.pool.total


def test_a_failing_round_fails_its_requests_and_not_the_next(
    toy: Opened, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode_round", broken)
        assert answer(toy, worker, "hello")[-1].error == "RuntimeError: out of memory"
    assert answer(toy, worker, "hello")[-1].completion_tokens == 40


def test_log_probabilities_follow_the_tokens(toy: Opened, worker: Worker) -> None:
    updates: queue.Queue[Update] = queue.Queue()
    prompt = tuple(chat_ids(toy, "hello"))
    worker.submit(Job("hello", prompt, 30, None, (), updates.put, top_logprobs=3))
    heard = [updates.get(timeout=SECONDS)]
    while not heard[-1].last:
        heard.append(updates.get(timeout=SECONDS))
    rows = [row for update in heard for row in update.logprobs]
    request = Request(prompt, 30)
    tokens = [token for step in decode.generate(toy.engine, Method("AR"), request) for token in step.tokens]
    assert [row.token for row in rows] == tokens
    for row in rows:
        assert len(row.top) == 3 and row.top[0][1] >= row.top[1][1] >= row.top[2][1] <= 0
        assert row.logprob <= row.top[0][1], "greedy takes the best"
        assert row.token in [token for token, _ in row.top]


@pytest.mark.parametrize("method", [Method(), Method("DDTREE")], ids=lambda method: method.algorithm)
def test_the_first_token_is_told_before_a_round_follows(
    toy: Opened, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    order: list[str] = []
    genuine = decode.decode_round

    def noted(*arguments: Any) -> Any:
        order.append("round")
        return genuine(*arguments)

    monkeypatch.setattr(decode, "decode_round", noted)
    worker = Worker(toy.engine, toy.tokenizer, method)
    ended = threading.Event()

    def emit(update: Update) -> None:
        order.append("update")
        if update.last:
            ended.set()

    worker.submit(job(toy, "hello", emit))
    worker.start()
    assert ended.wait(SECONDS)
    worker.stop()
    assert order[:3] == ["update", "round", "update"]


def test_a_stop_string_in_the_first_token_ends_the_answer_there(
    toy: Opened, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tuple(chat_ids(toy, "hello"))
    first = answer(toy, worker, "hello")[0].text[0]
    updates: queue.Queue[Update] = queue.Queue()
    worker.submit(Job("hello", prompt, 40, None, (first,), updates.put))
    ended = updates.get(timeout=SECONDS)
    assert (ended.text, ended.finish_reason, ended.completion_tokens) == ("", "stop", 1)
    assert answer(toy, worker, "hello")[-1].completion_tokens == 40
    assert updates.empty() and "failed" not in caplog.text
    assert worker.snapshot()["failed_requests_total"] == 0 and toy.engine.pool.free == toy.engine.pool.total


def test_text_held_back_for_a_stop_string_is_told_when_the_answer_ends_otherwise(toy: Opened) -> None:
    stops = ("ab!",)
    ended = Answer(toy.tokenizer, Method(), 10, toy.tokenizer.eos, stops)
    assert ended.push(Round(tuple(b"hab"), 2, 3), 0).text == "h"
    last = ended.push(Round((toy.tokenizer.eos,), 0, 3), 0)
    assert (last.text, last.finish_reason) == ("ab", "stop")
    cut = Answer(toy.tokenizer, Method(), 3, None, stops).push(Round(tuple(b"hab"), 2, 3), 0)
    assert (cut.text, cut.finish_reason) == ("hab", "length")
    stopped = Answer(toy.tokenizer, Method(), 10, None, stops).push(Round(tuple(b"hab!x"), 4, 5), 0)
    assert (stopped.text, stopped.finish_reason, stopped.completion_tokens) == ("h", "stop", 4)
