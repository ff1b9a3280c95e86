"""Requests of every kind: a DDTREE server answers as AR does, or refuses with HTTP 400 and goes on serving."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from hugging_face_greedy import greedy as hugging_face
from lossless import greedy, prompts
from sglang_server import SGLangServer
from tokenizers import Tokenizer
from trained_models import ModelPair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 24
LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
SENTENCE = "[{}]".format(", ".join(['"[a-u]{4,6}"'] * 3))
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}, "known": {"type": "boolean"}},
    "required": ["word", "known"],
    "additionalProperties": False,
}
PROCESSOR = (
    "from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor as P; print(P.to_str())"
)


class Servers(NamedTuple):
    """Two servers of one target."""

    ar: SGLangServer
    tree: SGLangServer


@pytest.fixture(scope="module")
def servers(plain_model: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("requests")
    shared = (
        "--grammar-backend",
        "xgrammar",
        "--constrained-json-disable-any-whitespace",
        "--max-running-requests",
        "8",
    )
    with (
        SGLangServer(plain_model.target, extra_args=shared, log_path=folder / "ar.log") as ar,
        SGLangServer(
            plain_model.target,
            drafter_path=plain_model.drafter,
            algorithm="DDTREE",
            budget=8,
            extra_args=[*shared, "--enable-custom-logit-processor", "--enable-return-hidden-states"],
            log_path=folder / "tree.log",
        ) as tree,
    ):
        yield Servers(ar, tree)


@pytest.fixture(scope="module")
def inputs(plain_model: ModelPair) -> list[list[int]]:
    return prompts(plain_model.target, 8)


@pytest.fixture(scope="module")
def usual(sglang_python: Path, plain_model: ModelPair, inputs: list[list[int]]) -> list[list[int]]:
    """The greedy answers without anything special."""
    return hugging_face(sglang_python, plain_model.target, inputs, 2 * TOKENS)


def both(servers: Servers, body: dict[str, Any], path: str = "/generate") -> tuple[Any, Any]:
    """What AR and DDTREE answer to one body."""
    with ThreadPoolExecutor(2) as users:
        answers = list(users.map(lambda server: server.post(path, body), servers))
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    return answers[0].json(), answers[1].json()


def ids_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def logprobs(entries: Any) -> Iterator[tuple[float | None, int]]:
    """The pairs of logprob and id in nested lists of [logprob, id, text]."""
    for entry in entries:
        if entry is not None and isinstance(entry[0], list):
            yield from logprobs(entry)
        elif entry is not None:
            yield entry[0], entry[1]


def assert_same_logprobs(found: dict[str, Any], wanted: dict[str, Any], count: int) -> None:
    """The same ids with logprobs within 1e-4, `count` rows of them in the answer."""
    for name in LOGPROBS:
        pairs = [list(logprobs(answer["meta_info"][name])) for answer in (found, wanted)]
        assert [token for _, token in pairs[0]] == [token for _, token in pairs[1]], name
        assert [value for value, _ in pairs[0]] == pytest.approx([value for value, _ in pairs[1]], abs=1e-4), name
        assert len(found["meta_info"][name]) == (len(wanted["meta_info"][name]) if name.startswith("input") else count)


def assert_serves(servers: Servers, inputs: list[list[int]], usual: list[list[int]], tokens: int = 12) -> None:
    """The tree's server still gives right answers to several prompts."""
    answers = servers.tree.generate(input_ids=inputs[:3], sampling_params=greedy(tokens))
    assert ids_of(answers) == [ids[:tokens] for ids in usual[:3]]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 2.0, "min_p": 1.0}],
    ids=["greedy", "sampled_where_one_token_is_left"],
)
def test_logprobs_are_those_of_ar(servers: Servers, inputs: list[list[int]], sampling: dict[str, Any]) -> None:
    body = {
        "input_ids": inputs[:3],
        "sampling_params": {**sampling, "max_new_tokens": TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [0, 70, 300],
    }
    wanted, found = both(servers, body)
    assert ids_of(found) == ids_of(wanted)
    assert any(len(answer["output_ids"]) > answer["meta_info"]["spec_verify_ct"] + 1 for answer in found)
    for answer, expected in zip(found, wanted, strict=True):
        assert_same_logprobs(answer, expected, TOKENS)


@pytest.mark.parametrize(
    ("grammar", "follows"),
    [
        ({"regex": SENTENCE[1:-1]}, lambda text: re.fullmatch(SENTENCE[1:-1], text)),
        ({"json_schema": json.dumps(SCHEMA)}, lambda text: json.loads(text).keys() == {"word", "known"}),
    ],
    ids=["regex", "json_schema"],
)
def test_a_grammar_is_followed_as_by_ar(
    servers: Servers, inputs: list[list[int]], usual: list[list[int]], grammar: dict[str, str], follows: Any
) -> None:
    params = {"temperature": 0, "max_new_tokens": 48}
    body = {"input_ids": inputs[:3], "sampling_params": [params | grammar, params | grammar, greedy(TOKENS)]}
    wanted, found = both(servers, body)
    assert ids_of(found) == ids_of(wanted)
    assert found[2]["output_ids"] == usual[2][:TOKENS]
    for answer in found[:2]:
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert follows(answer["text"])
    assert any(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in found[:2])


def test_logit_bias_is_applied_to_every_node(servers: Servers, inputs: list[list[int]], usual: list[list[int]]) -> None:
    banned = max(set(usual[0]), key=usual[0].count)
    biased = greedy(TOKENS) | {"logit_bias": {str(banned): -100.0}}
    wanted, found = both(servers, {"input_ids": inputs[:2], "sampling_params": [biased, greedy(TOKENS)]})
    assert ids_of(found) == ids_of(wanted)
    assert banned not in found[0]["output_ids"]
    assert found[1]["output_ids"] == usual[1][:TOKENS]


def test_answers_end_at_stop_strings_and_stop_tokens(
    servers: Servers, plain_model: ModelPair, inputs: list[list[int]], usual: list[list[int]]
) -> None:
    tokenizer = Tokenizer.from_file(str(plain_model.target / "tokenizer.json"))
    texts = [tokenizer.decode(ids) for ids in usual]
    stops: list[dict[str, Any]] = [
        {"stop": text[start : start + 5]} for text, start in zip(texts, (8, 15, 22), strict=False)
    ]
    stops += [{"stop": [texts[3][10:14], "never said"], "no_stop_trim": True}, {"stop_regex": "[aeiou] [b-t]"}]
    stops += [{"stop_token_ids": [usual[5][9]]}]
    body = {"input_ids": inputs[:6], "sampling_params": [greedy(2 * TOKENS) | stop for stop in stops]}
    wanted, found = both(servers, body)
    for answer, expected in zip(found, wanted, strict=True):
        assert answer["text"] == expected["text"]
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        assert answer["meta_info"]["completion_tokens"] == expected["meta_info"]["completion_tokens"]
    assert sum(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in found) >= 5


def test_greedy_requests_among_sampled_ones_of_other_lengths(
    servers: Servers, inputs: list[list[int]], usual: list[list[int]]
) -> None:
    lengths = (9, 40, 17, 33, 1, 26, 48, 12)
    sampled: dict[int, dict[str, Any]] = {
        1: {"temperature": 1.0},
        3: {"temperature": 0.8, "top_p": 0.9, "top_k": 5},
        6: {"temperature": 1.5, "min_p": 0.2},
    }
    params = [greedy(length) | sampled.get(n, {}) for n, length in enumerate(lengths)]
    found = ids_of(servers.tree.generate(input_ids=inputs, sampling_params=params))
    assert [len(ids) for ids in found] == list(lengths)
    for n, length in enumerate(lengths):
        if n not in sampled:
            assert found[n] == usual[n][:length], n


def test_several_answers_to_one_prompt(servers: Servers, inputs: list[list[int]], usual: list[list[int]]) -> None:
    found = servers.tree.generate(input_ids=inputs[0], sampling_params=greedy(TOKENS) | {"n": 3})
    assert ids_of(found) == [usual[0][:TOKENS]] * 3
    sampled = {"temperature": 1.5, "max_new_tokens": TOKENS, "ignore_eos": True, "n": 3}
    found = servers.tree.generate(input_ids=inputs[0], sampling_params=sampled)
    assert [len(ids) for ids in ids_of(found)] == [TOKENS] * 3
    assert len({tuple(ids) for ids in ids_of(found)}) > 1


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "tell"}]
    body = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 2 * TOKENS, "ignore_eos": True}
    return body | fields


def test_chat_completions_have_ars_text_and_the_spec_details(servers: Servers) -> None:
    wanted, found = both(servers, chat(return_spec_tokens_details=True), "/v1/chat/completions")
    assert len(found["choices"][0]["message"]["content"]) > TOKENS
    assert found["choices"] == wanted["choices"]
    assert found["usage"] == wanted["usage"]
    details = found["sglext"]["spec_tokens_details"]
    assert details["spec_num_proposed_drafts"] == 8 * details["spec_verify_ct"] > 0
    assert details["spec_verify_ct"] + details["spec_num_correct_drafts"] >= 2 * TOKENS - 1


def test_streamed_chat_completions_have_ars_text(servers: Servers) -> None:
    wanted = servers.ar.post("/v1/chat/completions", chat()).json()
    body = chat(stream=True, stream_options={"include_usage": True})
    with servers.tree.post("/v1/chat/completions", body, stream=True) as answer:
        chunks = list(events(answer))
    said = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(said) == wanted["choices"][0]["message"]["content"]
    assert sum(bool(part) for part in said) > 3
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * TOKENS


def events(answer: requests.Response) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in answer.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture(scope="module")
def refused(sglang_python: Path) -> dict[str, dict[str, Any]]:
    """Bodies that DDTREE refuses, by the name that the refusal must say."""
    processor = subprocess.run(
        [sglang_python, "-c", PROCESSOR], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout.splitlines()[-1]
    by_param = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2, "min_new_tokens": 4}
    bodies: dict[str, dict[str, Any]] = {
        name: {"sampling_params": greedy(8) | {name: value}} for name, value in by_param.items()
    }
    params = greedy(8) | {"custom_params": {"token_ids": [5]}}
    bodies["custom_logit_processor"] = {"sampling_params": params, "custom_logit_processor": processor}
    bodies["return_hidden_states"] = {"sampling_params": greedy(8), "return_hidden_states": True}
    return bodies


NAMES = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
    *("custom_logit_processor", "return_hidden_states"),
)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_tree_would_answer_otherwise_is_refused_by_name(
    servers: Servers,
    inputs: list[list[int]],
    usual: list[list[int]],
    refused: dict[str, dict[str, Any]],
    name: str,
) -> None:
    answer = servers.tree.post("/generate", {"input_ids": inputs[4], **refused[name]})
    assert answer.status_code == 400, answer.text
    assert name in answer.text
    assert "DDTREE" in answer.text
    assert_serves(servers, inputs, usual)


def test_refusals_amid_running_requests_change_nobody_elses_answer(
    servers: Servers, inputs: list[list[int]], usual: list[list[int]], refused: dict[str, dict[str, Any]]
) -> None:
    running = {"input_ids": inputs[:3], "sampling_params": greedy(2 * TOKENS)}
    with ThreadPoolExecutor(2) as users:
        answers = users.submit(servers.tree.post, "/generate", running)
        time.sleep(1)
        chatted = servers.tree.post("/v1/chat/completions", chat(frequency_penalty=0.5))
        statuses = [
            servers.tree.post("/generate", {"input_ids": inputs[5], **body}).status_code for body in refused.values()
        ]
        assert not answers.done() or answers.result().elapsed.total_seconds() > 1
        found = answers.result().json()
    assert statuses == [400] * len(NAMES)
    assert chatted.status_code == 400
    assert "frequency_penalty" in chatted.text
    assert ids_of(found) == usual[:3]


def test_a_client_that_goes_away_ends_its_request_and_no_other(
    servers: Servers, inputs: list[list[int]], usual: list[list[int]]
) -> None:
    endless = {"input_ids": inputs[7], "sampling_params": greedy(1900), "stream": True}
    with ThreadPoolExecutor(1) as users:
        other = users.submit(servers.tree.generate, input_ids=inputs[:2], sampling_params=greedy(2 * TOKENS))
        with servers.tree.post("/generate", endless, stream=True) as answer:
            assert next(events(answer))["output_ids"]
        assert ids_of(other.result()) == usual[:2]
    deadline = time.monotonic() + 30
    while (running := servers.tree.get("/v1/loads").json()["loads"][0]["num_running_reqs"]) > 0:
        assert time.monotonic() < deadline, f"{running} requests still run"
        time.sleep(0.5)
    assert_serves(servers, inputs, usual, 2 * TOKENS)
