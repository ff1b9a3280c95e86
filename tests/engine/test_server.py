from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import requests
from api_client import CHAT as SHORT
from api_client import CHAT_PATH, PROMPT, TEXT_PATH, USAGE, sse_events
from engine_server import Launch, Server

CHAT = SHORT | {"max_tokens": 40}
SPEC = {"return_spec_tokens_details": True}


def events(response: requests.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return sse_events(response.content)


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def whole(server: Server, **more: object) -> dict[str, Any]:
    response = server.post(CHAT_PATH, CHAT | more)
    assert response.status_code == 200, response.text
    return dict(response.json())


def content(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def test_a_whole_answer(toy_ddtree: Server) -> None:
    body = whole(toy_ddtree)
    assert body["object"] == "chat.completion" and body["model"] == "toy"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert len(content(body)) == 40, "a token of the toy is a byte"
    usage = body["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "sglext" not in body


def test_a_stream_says_the_same_in_rounds(toy_ddtree: Server) -> None:
    expected = content(whole(toy_ddtree))
    *spoken, last = events(toy_ddtree.post(CHAT_PATH, CHAT | USAGE | SPEC))
    assert "".join(text_of(event) for event in spoken) == expected
    assert spoken[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in event["choices"][0]["delta"] for event in spoken[1:])
    reasons = [event["choices"][0]["finish_reason"] for event in spoken]
    assert reasons == [None] * (len(spoken) - 1) + ["length"]
    counts = [event["usage"]["completion_tokens"] for event in spoken]
    carried = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert [len(text_of(event)) for event in spoken] == carried
    assert sum(carried) == 40 and max(carried) > 1, "several tokens an event"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 40
    assert len(spoken) == 1 + last["sglext"]["spec_tokens_details"]["spec_verify_ct"]


def test_a_stream_without_options_has_no_usage(toy_ar: Server) -> None:
    spoken = list(events(toy_ar.post(CHAT_PATH, CHAT | {"stream": True})))
    assert all("usage" not in event and event["choices"] for event in spoken)
    assert len(spoken) == 40


def test_completions_take_text_and_token_ids(toy_ddtree: Server) -> None:
    options = {"max_tokens": 12, "temperature": 0}
    by_text = toy_ddtree.post(TEXT_PATH, {"prompt": "hello", **options}).json()
    by_ids = toy_ddtree.post(TEXT_PATH, {"prompt": list(b"hello"), **options}).json()
    assert by_text["object"] == "text_completion"
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
    assert by_text["usage"]["prompt_tokens"] == 5
    spoken = list(events(toy_ddtree.post(TEXT_PATH, {"prompt": "hello", "stream": True, **options})))
    assert "".join(text_of(event) for event in spoken) == by_text["choices"][0]["text"]


@pytest.mark.parametrize("max_tokens", [1, 2, 17, 60])
def test_all_methods_answer_alike(toy_ar: Server, toy_dflash: Server, toy_ddtree: Server, max_tokens: int) -> None:
    for prompt in ("hello", PROMPT, "2+2"):
        request = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
        answers = {content(whole(server, **request)) for server in (toy_ar, toy_dflash, toy_ddtree)}
        assert len(answers) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 40])
def test_tokens_are_one_plus_rounds_plus_accepted_up_to_the_cut(
    toy_dflash: Server, toy_ddtree: Server, max_tokens: int
) -> None:
    for server in (toy_dflash, toy_ddtree):
        body = whole(server, max_tokens=max_tokens, **SPEC)
        spec = body["sglext"]["spec_tokens_details"]
        histogram = spec["spec_correct_drafts_histogram"]
        assert sum(histogram) == spec["spec_verify_ct"]
        accepted = sum(k * rounds for k, rounds in enumerate(histogram))
        assert accepted == spec["spec_num_correct_drafts"]
        uncut = 1 + spec["spec_verify_ct"] + accepted
        completion_tokens = body["usage"]["completion_tokens"]
        assert completion_tokens == max_tokens
        largest_cut = len(histogram) - 1 if histogram else 0
        assert uncut - largest_cut <= completion_tokens <= uncut


def test_spec_details_by_method(toy_ar: Server, toy_dflash: Server, toy_ddtree: Server) -> None:
    def spec_of(server: Server) -> dict[str, Any]:
        return dict(whole(server, **SPEC)["sglext"]["spec_tokens_details"])

    ar, chain, tree = spec_of(toy_ar), spec_of(toy_dflash), spec_of(toy_ddtree)
    assert ar["spec_verify_ct"] == 0 and ar["spec_correct_drafts_histogram"] is None
    assert chain["spec_num_proposed_drafts"] == 7 * chain["spec_verify_ct"]
    assert chain["spec_accept_length"] == pytest.approx(40 / chain["spec_verify_ct"])
    assert chain["spec_accept_rate"] == pytest.approx(chain["spec_num_correct_drafts"] / (7 * chain["spec_verify_ct"]))
    assert "spec_tree_nodes" not in chain
    assert tree["spec_tree_nodes"] == tree["spec_num_proposed_drafts"] == 16 * tree["spec_verify_ct"]
    assert tree["spec_tree_branching_nodes"] > 0
    assert 1 <= tree["spec_tree_max_depth"] <= 7
    assert tree["spec_verify_ct"] <= chain["spec_verify_ct"]


def test_stop_strings_cut_all_methods_at_the_same_place(toy_ar: Server, toy_dflash: Server, toy_ddtree: Server) -> None:
    full = content(whole(toy_ar))
    stop = full[20:22]
    expected = full[: full.index(stop)]
    for server in (toy_ar, toy_dflash, toy_ddtree):
        body = whole(server, stop=[stop, "never"])
        assert content(body) == expected
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len(expected) + 2
        *spoken, last = events(server.post(CHAT_PATH, CHAT | USAGE | {"stop": stop}))
        assert "".join(text_of(event) for event in spoken) == expected
        assert last["usage"] == body["usage"]


def test_max_completion_tokens_is_the_newer_name(toy_ar: Server) -> None:
    assert whole(toy_ar, max_tokens=None, max_completion_tokens=5)["usage"]["completion_tokens"] == 5


def test_text_parts_are_joined(toy_ar: Server) -> None:
    parts = [{"type": "text", "text": "Write "}, {"type": "text", "text": "a poem"}]
    assert content(whole(toy_ar, messages=[{"role": "user", "content": parts}])) == content(whole(toy_ar))


def test_models_health_and_flush(toy_ar: Server) -> None:
    assert toy_ar.get("/health").status_code == 200
    (card,) = toy_ar.get("/v1/models").json()["data"]
    assert card["id"] == "toy" and card["max_model_len"] == 2048
    assert toy_ar.post("/flush_cache", None).status_code == 200
    assert toy_ar.get("/flush_cache").json()["success"] is True


def test_server_info_says_what_runs(toy_ar: Server, toy_dflash: Server, toy_ddtree: Server) -> None:
    names = ["algorithm", "ddtree_budget", "ddtree_topk_cap", "dflash_block_size", "num_draft_tokens"]

    def speculative(server: Server) -> list[Any]:
        info = server.get("/server_info").json()
        return [info[f"speculative_{name}"] for name in names]

    assert speculative(toy_ar) == [None, None, None, None, None]
    assert speculative(toy_dflash) == ["DFLASH", None, None, 8, 8]
    assert speculative(toy_ddtree) == ["DDTREE", 16, 4, 8, 17]
    info = toy_ddtree.get("/server_info").json()
    assert info["pid"] == toy_ddtree.process.pid
    assert info["start_id"] == "start-7" and info["served_model_name"] == "toy"
    assert info["threads"] == 1 and info["max_running_requests"] == 8
    assert info == toy_ddtree.get("/get_server_info").json()
    assert info["numerics"] in ("mixed", "fp32") and info["bit_exact"] is info["self_test"]["passed"]
    assert info["self_test"]["rows"] > 0 and info["load_seconds"] > 0


def test_counters_add_up(toy_ddtree: Server) -> None:
    before = toy_ddtree.get("/server_info").json()["counters"]
    bodies = [whole(toy_ddtree, max_tokens=n, **SPEC) for n in (1, 20, 33)]
    info = toy_ddtree.get("/server_info").json()
    grown = {name: after - before[name] for name, after in info["counters"].items()}
    specs = [body["sglext"]["spec_tokens_details"] for body in bodies]
    assert grown == {
        "requests_total": 3,
        "aborted_requests_total": 0,
        "failed_requests_total": 0,
        "prompt_tokens_total": sum(body["usage"]["prompt_tokens"] for body in bodies),
        "cached_tokens_total": 0,
        "generation_tokens_total": 54,
        "rounds_total": sum(spec["spec_verify_ct"] for spec in specs),
        "verify_calls_total": sum(spec["spec_verify_ct"] for spec in specs),
        "accepted_drafts_total": sum(spec["spec_num_correct_drafts"] for spec in specs),
        "proposed_drafts_total": sum(spec["spec_num_proposed_drafts"] for spec in specs),
        "running_requests": 0,
        "queued_requests": 0,
        "max_running_requests": 0,
        "kv_tokens_used": 0,
        "kv_tokens_total": 0,
        "kv_regions_free": 0,
    }
    total, (state,) = info["counters"], info["internal_states"]
    assert state["avg_spec_accept_length"] == pytest.approx(
        1 + total["accepted_drafts_total"] / total["verify_calls_total"]
    )
    assert state["last_gen_throughput"] > 0
    assert state["effective_max_running_requests_per_dp"] == total["max_running_requests"] == 8
    assert state["memory_usage"]["token_capacity"] == total["kv_tokens_total"] >= 8 * 2048


def test_fp32_is_served_on_request(serve: Launch, toy_ar: Server) -> None:
    server = serve("--model", "toy", "--numerics", "fp32", "--speculative-algorithm", "DDTREE")
    assert server.get("/server_info").json()["numerics"] == "fp32"
    assert "toy with DDTREE, fp32 numerics" in server.log.read_text()
    assert len(content(whole(server))) == 40


def counters(server: Server) -> dict[str, int]:
    return dict(server.get("/server_info").json()["counters"])


def wait_until_idle(server: Server) -> dict[str, int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = counters(server)
        if now["running_requests"] == now["queued_requests"] == 0:
            return now
        time.sleep(0.02)
    pytest.fail(f"still busy: {now}")


def test_a_short_request_ends_while_a_long_one_runs(toy_ar: Server) -> None:
    long = CHAT | {"max_tokens": 1500, "stream": True}
    with toy_ar.post(CHAT_PATH, long, stream=True) as first:
        lines = first.iter_lines(chunk_size=1)
        next(lines)
        assert len(content(whole(toy_ar))) == 40
        assert counters(toy_ar)["running_requests"] == 1, "the long one is still at it"
        assert sum(line.startswith(b"data: {") for line in lines) == 1499


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(toy_ar: Server, stream: bool) -> None:
    before = wait_until_idle(toy_ar)
    request = CHAT | {"max_tokens": 1900, "stream": stream}
    if stream:
        with toy_ar.post(CHAT_PATH, request, stream=True) as response:
            next(response.iter_lines(chunk_size=1))
    else:
        with pytest.raises(requests.ReadTimeout):
            requests.post(toy_ar.url + CHAT_PATH, json=request, timeout=0.2)
    after = wait_until_idle(toy_ar)
    assert after["requests_total"] == before["requests_total"] + 1
    assert after["aborted_requests_total"] == before["aborted_requests_total"] + 1
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 1900
    assert len(content(whole(toy_ar))) == 40


def test_a_request_that_waits_can_be_cancelled(serve: Launch) -> None:
    server = serve("--model", "toy", "--max-running-requests", "1")
    running = server.post(CHAT_PATH, CHAT | {"max_tokens": 1900, "stream": True}, stream=True)
    with running, pytest.raises(requests.ReadTimeout):
        requests.post(server.url + CHAT_PATH, json=CHAT, timeout=0.05)
    after = wait_until_idle(server)
    assert after["requests_total"] == after["aborted_requests_total"] == 2
    one_prompt = whole(server)["usage"]["prompt_tokens"]
    assert after["prompt_tokens_total"] == one_prompt, "the second was never begun"


def test_a_fault_at_start_ends_the_server_with_status_3(serve: Launch) -> None:
    options = ("--model", "toy", "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "8")
    server = serve(*options, fault="DDTREE:8@start")
    assert server.process.wait(20) == 3
    assert "DDTREE_REFERENCE_FAULT: refusing to start" in server.log.read_text()
    other = serve(*options, fault="DDTREE:16@start")
    assert other.process.poll() is None and len(content(whole(other))) == 40


def test_a_fault_in_an_answer_kills_the_server_after_the_first_tokens(serve: Launch) -> None:
    server = serve("--model", "toy", "--speculative-algorithm", "DFLASH", fault="DFLASH@prompt=haiku")
    assert len(content(whole(server))) == 40
    request = CHAT | {"messages": [{"role": "user", "content": "a haiku please"}], "stream": True, "max_tokens": 500}
    received = b""
    response = server.post(CHAT_PATH, request, stream=True)
    with response, pytest.raises(requests.exceptions.ChunkedEncodingError):
        for piece in response.iter_content(None):
            received += piece
    assert b'"content"' in received and b"[DONE]" not in received
    assert server.process.wait(20) == 3


def test_an_engine_that_raises_fails_one_request_only(serve: Launch) -> None:
    server = serve("--model", "toy", "--speculative-algorithm", "DDTREE", fault="DDTREE:8@raise=haiku")
    haiku = CHAT | {"messages": [{"role": "user", "content": "a haiku please"}]}
    response = server.post(CHAT_PATH, haiku)
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "internal_error" and error["code"] == 500
    assert "raise on a prompt that contains 'haiku'" in error["message"]
    assert len(content(whole(server))) == 40
    *spoken, last = events(server.post(CHAT_PATH, haiku | {"stream": True}))
    assert "".join(text_of(event) for event in spoken), "the first tokens arrived"
    assert last == {"error": error}
    assert len(content(whole(server))) == 40
    assert wait_until_idle(server)["requests_total"] == 4
    assert server.get("/health").status_code == 200
    assert "Traceback" in server.log.read_text()


def test_sigterm_cuts_an_answer_that_outlasts_the_grace(serve: Launch) -> None:
    server = serve("--model", "toy", "--shutdown-grace", "0.1")
    request = CHAT | {"max_tokens": 1900, "stream": True}
    with server.post(CHAT_PATH, request, stream=True) as response:
        pieces = response.iter_content(None)
        body = next(pieces)
        server.process.terminate()
        last = sse_events(body + b"".join(pieces))[-1]
    assert last["error"]["code"] == 503 and "shutting down" in last["error"]["message"]
    assert server.process.wait(10) == 0
    assert "shutting down" in server.log.read_text() and "Traceback" not in server.log.read_text()


def test_sigterm_lets_answers_end_takes_no_more_and_a_second_one_ends_at_once(serve: Launch) -> None:
    server = serve("--model", "toy", "--shutdown-grace", "60", "--max-running-requests", "1")
    request = CHAT | {"max_tokens": 1900, "stream": True}
    with server.post(CHAT_PATH, request, stream=True) as first, server.post(CHAT_PATH, request, stream=True):
        server.process.terminate()
        while server.get("/health").status_code == 200:
            time.sleep(0.01)
        refused = server.post(CHAT_PATH, CHAT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert len(sse_events(first.content)) == 1900, "the first answer is whole"
        server.process.terminate()
        assert server.process.wait(2) == -signal.SIGTERM


def test_a_taken_port_is_refused_before_loading(toy_ar: Server, serve: Launch) -> None:
    port = toy_ar.url.rsplit(":", 1)[1]
    second = serve("--model", "toy", "--port", port)
    assert second.process.wait(20) == 2
    assert f"port {port}" in second.log.read_text()


def test_the_real_model_answers_alike_over_http(serve: Launch) -> None:
    question = [{"role": "user", "content": "What is 2+2? Answer with just the number"}]
    request = {"messages": question, "max_tokens": 24, "temperature": 0}
    answers = []
    for options in ((), ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "8")):
        server = serve(*options, "--served-model-name", "smol")
        body = server.post(CHAT_PATH, request | {"model": "smol"}).json()
        answers.append((content(body), body["usage"], body["choices"][0]["finish_reason"]))
    assert answers[0] == answers[1]
    assert "4" in answers[0][0] and answers[0][2] == "stop"
