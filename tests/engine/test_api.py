"""What requests may ask for and how they are answered, on the toy engine in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_client import (
    CHAT,
    CHAT_PATH,
    DRAWN,
    TEXT,
    TEXT_PATH,
    USAGE,
    InProcess,
    chat,
    contents,
    counters,
    error_of,
    in_process,
    wait_until_idle,
)

from ddtree_reference import server, startup
from ddtree_reference.method import Method
from ddtree_reference.protocol import MAX_BODY_BYTES
from ddtree_reference.startup import Opened
from ddtree_reference.worker import Job, Worker


@pytest.fixture(scope="module")
def api(toy: Opened) -> Iterator[InProcess]:
    with in_process(toy, Method("DDTREE", budget=16)) as served:
        yield served


# Sampling and several choices


def test_choices_are_the_answers_of_successive_seeds(api: InProcess) -> None:
    body = chat(api, n=3, seed=7, return_spec_tokens_details=True, **DRAWN)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert contents(body) == [contents(chat(api, seed=seed, **DRAWN))[0] for seed in (7, 8, 9)]
    assert len({*contents(body)}) == 3
    usage = body["usage"]
    assert usage["completion_tokens"] == 120 and usage["total_tokens"] == usage["prompt_tokens"] + 120
    assert usage["prompt_tokens"] == chat(api)["usage"]["prompt_tokens"], "counted once"
    specs = body["sglext"]["spec_tokens_details"]
    assert [sum(spec["spec_correct_drafts_histogram"]) for spec in specs] == [spec["spec_verify_ct"] for spec in specs]
    assert len(specs) == 3


def test_greedy_choices_are_equal(api: InProcess) -> None:
    assert contents(chat(api, n=2)) == contents(chat(api)) * 2


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_streams_of_choices_interleave(api: InProcess, path: str) -> None:
    request = (CHAT if path == CHAT_PATH else TEXT) | DRAWN | {"n": 3, "seed": 1}
    whole = api.post(path, request).json()
    *spoken, last = api.post(path, request | USAGE | {"return_spec_tokens_details": True}).events()
    said, indices, reasons = ["", "", ""], [], []
    for event in spoken:
        (choice,) = event["choices"]
        indices.append(choice["index"])
        said[choice["index"]] += choice["delta"].get("content", "") if path == CHAT_PATH else choice["text"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert said == (contents(whole) if path == CHAT_PATH else [choice["text"] for choice in whole["choices"]])
    assert reasons == ["length"] * 3
    assert indices != sorted(indices), "events of different choices alternate"
    if path == CHAT_PATH:
        roles = [event["choices"][0]["index"] for event in spoken if "role" in event["choices"][0]["delta"]]
        assert sorted(roles) == [0, 1, 2], "each choice names its role once"
    counts = [event["usage"]["completion_tokens"] for event in spoken]
    assert counts == sorted(counts) and last["usage"] == whole["usage"]
    assert last["choices"] == [] and len(last["sglext"]["spec_tokens_details"]) == 3


def test_a_seed_fixes_the_answer_and_no_seed_does_not(api: InProcess) -> None:
    assert contents(chat(api, seed=5, **DRAWN)) == contents(chat(api, seed=5, **DRAWN))
    assert contents(chat(api, **DRAWN)) != contents(chat(api, **DRAWN))
    for seed in (-1, -(2**63) + 1, 2**63 - 1):
        assert len(contents(chat(api, seed=seed, n=2, temperature=1))) == 2


def test_what_a_request_leaves_out(api: InProcess) -> None:
    said = {"messages": CHAT["messages"], "seed": 7, "n": 16}
    default = api.post(CHAT_PATH, said).json()
    assert default["usage"]["completion_tokens"] == 16 * 128
    assert len({*contents(default)}) > 1, "drawn, not greedy"
    assert contents(default) == contents(api.post(CHAT_PATH, said | {"temperature": 1.0}).json())
    nothing = dict.fromkeys(["temperature", "top_p", "top_k", "n", "stop", "stream", "stream_options", "max_tokens"])
    assert contents(api.post(CHAT_PATH, said | nothing).json()) == contents(default)[:1]


def test_cuts_that_leave_one_token_are_greedy_and_cuts_that_leave_all_change_nothing(api: InProcess) -> None:
    greedy = contents(chat(api))
    for cut in ({"temperature": 1e-7}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 1e-9}):
        assert contents(chat(api, seed=3, **cut)) == greedy
    drawn = contents(chat(api, seed=3, **DRAWN))
    assert drawn != greedy
    for loose in ({"top_k": -1}, {"top_k": 0}, {"top_k": 2**31 - 1}, {"top_p": 1.0}):
        assert contents(chat(api, seed=3, **DRAWN, **loose)) == drawn


# Errors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: malformed JSON at character 0"),
        (b"{not json", "body: malformed JSON at character 1"),
        (b'{"max_tokens": 5,}', "body: malformed JSON"),
        (b"\xff\xfe{}", "body: no UTF-8 at byte 0; send JSON as UTF-8"),
        (b"\xef\xbb\xbf{}", "body: malformed JSON at character 0"),
        (b"[]", "body: Input should be a valid dictionary"),
        (b'{"temperature": NaN}', "body: NaN is no JSON"),
        (b'{"user": -Infinity}', "body: -Infinity is no JSON"),
        (b'{"temperature": 1e999}', "temperature: Input should be a finite number, got inf"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "body: Exceeds the limit"),
        (b'{"user": ' + b"[" * 100_000, "body: nested too deep"),
        (b'{"tools": ' + b"[" * 500 + b"]" * 500 + b"}", "tools: [[[[[["),
        (b'{"messages": [' + b"7," * 500_000 + b"7]}", "messages.0: Input should be a valid dictionary"),
    ],
)
def test_bodies_that_are_no_request(api: InProcess, body: bytes, message: str) -> None:
    began = time.perf_counter()
    complete = body.replace(b'{"t', b'{"messages": [{"role": "user", "content": "a"}], "t')
    assert message in error_of(api.ask("POST", CHAT_PATH, complete), 400)["message"]
    assert time.perf_counter() - began < 1, "the event loop must not be held up"


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt-5"}, 404, "model 'gpt-5' is not served here; the one that is: 'toy'"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 2048}, 400, "exceed the maximum context of 2048"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0.content"),
        ({"best_of": 3}, 400, "best_of"),
        ({"stop": ["a", ""]}, 400, "stop"),
        ({"top_p": 0}, 400, "top_p"),
        ({"min_p": 0.1}, 400, "min_p"),
        ({"min_tokens": 8}, 400, "min_tokens"),
        ({"presence_penalty": 1}, 400, "presence_penalty"),
        ({"frequency_penalty": -0.5}, 400, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, 400, "repetition_penalty"),
        ({"logit_bias": {"5": 100}}, 400, "logit_bias"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"stop_token_ids": [5]}, 400, "stop_token_ids"),
        ({"bad_words": ["a"]}, 400, "bad_words"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"guided_regex": "a+"}, 400, "guided_regex: 'a+' is not supported here; leave it out"),
        ({"skip_special_tokens": False}, 400, "skip_special_tokens"),
        ({"continue_final_message": True}, 400, "continue_final_message"),
        ({"echo": True}, 400, "echo"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"seed": 1.5}, 400, "seed"),
        ({"stop": "\ud83d"}, 400, "stop is not valid Unicode: U+D83D alone at character 0"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, 400, "prompt is not valid Unicode: U+D800"),
        ({"messages": [{"role": "\ud800", "content": "a"}]}, 400, "messages.0.role"),
        ({"model": "\ud800"}, 404, "is not served here"),
        ({"regex": "\ud800"}, 400, "regex"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
    ],
)
def test_requests_the_server_cannot_do(api: InProcess, change: dict[str, Any], status: int, message: str) -> None:
    error = error_of(api.post(CHAT_PATH, CHAT | change), status)
    assert message in error["message"] and error["type"] == "invalid_request_error"


OFF: dict[str, Any] = {
    "n": 1, "best_of": 1, "min_p": 0, "min_tokens": 0, "presence_penalty": 0, "frequency_penalty": 0.0,
    "repetition_penalty": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "stop_token_ids": [],
    "response_format": {"type": "text"}, "tools": [], "skip_special_tokens": True, "stop": [], "regex": None,
}  # fmt: skip


def test_fields_that_are_off_and_fields_without_a_say_pass(api: InProcess) -> None:
    expected = contents(chat(api))
    assert contents(chat(api, **OFF, user="me", metadata={"a": "b"}, top_p=0.5, top_k=3, seed=7)) == expected
    nothing = dict.fromkeys(OFF)
    assert contents(chat(api, **nothing)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 17}, "n: Input should be less than or equal to 16, got 17"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": True}, "n: Input should be a valid integer, got True"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0, got -1"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": -5}, "max_tokens: Input should be greater than or equal to 1, got -5"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 2030}, "prompt tokens + max_tokens 2030 exceed the maximum context of 2048 tokens; send a"),
        ({"logprobs": 3}, "logprobs: Input should be a valid boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs: 2 is asked for without logprobs; send logprobs: true"),
        ({"stop": ["a"] * 17}, "stop: give up to 16 strings"),
        ({"stop": [[]]}, "stop.list[str].0"),
        ({"messages": [{"role": "user", "content": "a"}] * 3000}, "messages: 3000 of them exceed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"input_ids": [1, 2]}, "input_ids: [1, 2] is not supported here; leave it out"),
        ({"tools": ["x" * 10_000]}, "tools: ['xxxxxxxxxxxx...xxxxxxxxxxxxx'] is not supported here"),
    ],
)
def test_fields_out_of_bounds_name_themselves(api: InProcess, change: dict[str, Any], message: str) -> None:
    assert message in error_of(api.post(CHAT_PATH, CHAT | change), 400)["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": True}, "logprobs: Input should be a valid integer, got True"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs: 2 is not supported here"),
        ({"prompt": ["a", "b"]}, "prompt.list[int].0"),
        ({"prompt": [65] * 3000}, "prompt: 3000 tokens exceed the maximum context of 2048 tokens; send fewer"),
        ({"prompt": [65] * 2048}, "2048 prompt tokens + max_tokens 24 exceed"),
        ({"prompt": [-1]}, "prompt: token ids must be in 0..257"),
        ({"prompt": [10**40]}, "prompt: token ids must be in 0..257"),
        ({"prompt": ""}, "prompt: it must hold at least one token"),
        ({"prompt": []}, "prompt: it must hold at least one token"),
        ({"prompt": "a" * 900_000}, "prompt: 900000 characters exceed the maximum context of 2048 tokens"),
        ({"prompt": [True]}, "prompt.list[int].0"),
        ({"prompt": "a\udfff"}, "prompt is not valid Unicode: U+DFFF alone at character 1"),
        ({"stop": ["x", "\ud800"]}, "stop is not valid Unicode"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_completion_fields_out_of_bounds(api: InProcess, change: dict[str, Any], message: str) -> None:
    assert message in error_of(api.post(TEXT_PATH, TEXT | change), 400)["message"]


def test_wrong_places_and_types(api: InProcess) -> None:
    assert error_of(api.get("/v1/nothing"), 404)["message"] == "GET /v1/nothing: Not Found"
    assert error_of(api.post(CHAT_PATH + "/", CHAT), 404)["type"] == "invalid_request_error"
    wrong = api.get(CHAT_PATH)
    assert (
        error_of(wrong, 405)["message"] == f"GET {CHAT_PATH}: Method Not Allowed" and wrong.headers["allow"] == "POST"
    )
    body = json.dumps(CHAT).encode()
    for kind in ((), (("content-type", "text/plain"),), (("content-type", "application/x-www-form-urlencoded"),)):
        assert "send application/json" in error_of(api.ask("POST", CHAT_PATH, body, kind), 415)["message"]
    assert api.ask("POST", CHAT_PATH, body, [("Content-Type", "Application/JSON; charset=utf-8")]).status == 200
    assert error_of(api.post(CHAT_PATH, CHAT | {"model": "x" * 500}), 404)["message"].startswith("model 'xxx")
    large = json.dumps(CHAT | {"user": "x" * MAX_BODY_BYTES}).encode()
    assert f"more than {MAX_BODY_BYTES} bytes" in error_of(api.ask("POST", CHAT_PATH, large), 413)["message"]
    assert contents(chat(api))


# Clients that leave, a full queue, health, and the end


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_every_choice(api: InProcess, stream: bool) -> None:
    before = wait_until_idle(api)
    request = CHAT | {"max_tokens": 1900, "n": 4, "stream": stream}
    assert api.post(CHAT_PATH, request, leave_after=5 if stream else 0).status in (200, 400)
    after = wait_until_idle(api)
    assert after["requests_total"] == before["requests_total"] + 4
    assert after["aborted_requests_total"] == before["aborted_requests_total"] + 4
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 4 * 1900


def test_a_full_queue_refuses_a_request_with_all_its_choices(toy: Opened) -> None:
    class Full(Worker):
        taken: list[Job]

        def submit(self, job: Job) -> None:
            self.taken.append(job)
            super().submit(job)

    worker = Full(toy.engine, toy.tokenizer, Method(), max_queued_requests=5)
    worker.taken = []
    with in_process(toy, Method(), worker) as api:
        reply = api.post(CHAT_PATH, CHAT | {"n": 16, "max_tokens": 1900})
        error = error_of(reply, 503)
        assert error["message"] == "5 requests wait already; try again later"
        assert error["type"] == "service_unavailable" and reply.headers["retry-after"] == "1"
        assert all(job.cancelled.is_set() for job in worker.taken)
        wait_until_idle(api)
        assert contents(chat(api))


class Deaf(Worker):
    """Takes requests and never answers."""

    def submit(self, job: Job) -> None:
        assert job.max_tokens == 1


def test_health_generate_answers_a_token_or_503(toy: Opened, api: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    before = counters(api)["generation_tokens_total"]
    assert api.get("/health_generate").status == 200
    assert counters(api)["generation_tokens_total"] == before + 1
    monkeypatch.setattr(server, "GENERATE_SECONDS", 0.05)
    with in_process(toy, Method(), Deaf(toy.engine, toy.tokenizer, Method())) as deaf:
        assert deaf.get("/health").status == 200
        assert "no token was generated" in error_of(deaf.get("/health_generate"), 503)["message"]


def test_a_full_queue_that_moves_is_healthy(toy: Opened) -> None:
    worker = Worker(toy.engine, toy.tokenizer, Method(), max_queued_requests=1)
    with in_process(toy, Method(), worker) as api, ThreadPoolExecutor() as clients:
        many = CHAT | {"max_tokens": 600, "ignore_eos": True, "n": toy.engine.pool.total + 1}
        busy = clients.submit(api.post, CHAT_PATH, many)
        while counters(api)["running_requests"] < toy.engine.pool.total and not busy.done():
            time.sleep(0.001)
        assert api.get("/health_generate").status == 200
        assert busy.result().status == 200


def test_what_openai_clients_send_is_taken(api: InProcess) -> None:
    assert api.get("/v1/models/toy").json()["id"] == "toy"
    assert "other" in error_of(api.get("/v1/models/other"), 404)["message"]
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "again"},
    ]
    assert api.post(CHAT_PATH, CHAT | {"messages": messages}).status == 200


def test_an_engine_that_has_ended_is_not_healthy(toy: Opened) -> None:
    worker = Worker(toy.engine, toy.tokenizer, Method())
    with in_process(toy, Method(), worker) as api:
        assert api.get("/health").status == 200
        worker.stop(10)
        for reply in (api.get("/health"), api.get("/health_generate"), api.post(CHAT_PATH, CHAT)):
            assert "the engine thread has ended" in error_of(reply, 503)["message"]


def test_a_server_that_shuts_down_takes_no_more_and_cuts_what_takes_too_long(toy: Opened) -> None:
    with in_process(toy, Method()) as api, ThreadPoolExecutor() as clients:
        in_flight = api.app.state.in_flight
        long = CHAT | {"max_tokens": 1900}
        replies = [clients.submit(api.post, CHAT_PATH, long | {"stream": stream, "n": 2}) for stream in (True, False)]
        while counters(api)["running_requests"] < 4:
            time.sleep(0.001)
        draining = clients.submit(api.run, server._drain(in_flight, 0.2))
        while not in_flight.closed:
            time.sleep(0.001)
        refused = api.post(CHAT_PATH, CHAT)
        assert "shutting down" in error_of(refused, 503)["message"] and refused.headers["retry-after"] == "1"
        assert error_of(api.get("/health"), 503)
        streamed, whole = (reply.result() for reply in replies)
        cut = error_of(whole, 503)
        assert cut["message"] == "the server is shutting down, the answer is cut"
        *spoken, last = streamed.events()
        assert spoken and last == {"error": cut}
        assert draining.result() is None
        assert wait_until_idle(api)["aborted_requests_total"] == 4


def test_cached_tokens_are_reported_until_the_cache_is_flushed() -> None:
    opened = startup.open_engine("toy", "auto", [Method()], reuse_prefixes=True)
    with in_process(opened, Method()) as api:

        def cached() -> tuple[int, int]:
            body = chat(api)
            last = api.post(CHAT_PATH, CHAT | USAGE).events()[-1]
            return tuple(said["usage"]["prompt_tokens_details"]["cached_tokens"] for said in (body, last))

        prompt_tokens = chat(api)["usage"]["prompt_tokens"]
        assert cached() == (prompt_tokens - 1, prompt_tokens - 1)
        assert counters(api)["cached_tokens_total"] == 2 * (prompt_tokens - 1)
        assert api.ask("POST", "/flush_cache").json()["success"] is True
        assert cached() == (0, prompt_tokens - 1)


def test_the_cache_is_not_flushed_under_a_request(api: InProcess) -> None:
    assert api.ask("POST", "/flush_cache").json()["success"] is True
    request = CHAT | {"max_tokens": 1500}
    running = threading.Thread(target=api.post, args=(CHAT_PATH, request))
    running.start()
    while counters(api)["running_requests"] == 0:
        time.sleep(0.001)
    assert "1 requests run and 0 wait" in error_of(api.ask("POST", "/flush_cache"), 400)["message"]
    running.join(30)
    wait_until_idle(api)
    assert api.get("/flush_cache").json()["success"] is True
