from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import requests
import uvicorn
from engine_server import chat_ids, free_port

from ddtree_reference import server
from ddtree_reference.decode import Method
from ddtree_reference.startup import Opened
from ddtree_reference.worker import Fault, Job, Update, Worker

SECONDS = 30


@pytest.fixture
def worker(toy: Opened) -> Iterator[Worker]:
    worker = Worker(toy.engine, toy.tokenizer, Method("DDTREE"), 1, Fault("raise", "forbidden"))
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
def test_a_server_whose_engine_thread_is_dead_says_so(toy: Opened) -> None:
    worker = Worker(toy.engine, toy.tokenizer, Method(), 1)
    port = free_port()
    app = server.create_app(server.Service(toy, worker, "toy", 1, 1, "start", 0.0))
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
