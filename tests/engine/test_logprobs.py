"""Log probabilities over HTTP, in the forms of both endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
from api_client import CHAT, CHAT_PATH, DRAWN, TEXT, TEXT_PATH, USAGE, InProcess, chat, contents, in_process, text

from ddtree_reference.logprobs import LEAST, LogprobForm
from ddtree_reference.method import Method
from ddtree_reference.startup import Opened
from ddtree_reference.walk import TokenLogprob


@pytest.fixture(scope="module")
def api(toy: Opened) -> Iterator[InProcess]:
    with in_process(toy, Method("DDTREE", budget=16)) as served:
        yield served


def test_chat_logprobs_are_those_of_the_tokens_of_the_answer(api: InProcess) -> None:
    body = chat(api, logprobs=True, top_logprobs=3)
    (choice,) = body["choices"]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == body["usage"]["completion_tokens"] == 24
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == choice["message"]["content"]
    for token in tokens:
        likely = token["top_logprobs"]
        assert len(likely) == 3 and {*token} - {"top_logprobs"} == {*likely[0]} == {"token", "bytes", "logprob"}
        assert [one["logprob"] for one in likely] == sorted((one["logprob"] for one in likely), reverse=True)
        assert token["logprob"] <= 0 and likely[0]["token"] == token["token"], "greedy takes the likeliest"
        assert likely[0]["logprob"] == token["logprob"]


def test_chat_logprobs_without_the_likeliest(api: InProcess) -> None:
    tokens = chat(api, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 24 and all(token["top_logprobs"] == [] for token in tokens)
    assert chat(api, logprobs=False)["choices"][0]["logprobs"] is None


def test_completion_logprobs_are_lists_of_equal_length(api: InProcess) -> None:
    (choice,) = text(api, logprobs=2)["choices"]
    said = choice["logprobs"]
    assert {name: len(values) for name, values in said.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 24
    )
    assert "".join(said["tokens"]) == choice["text"]
    assert said["text_offset"] == [0, *accumulate(len(token) for token in said["tokens"])][:-1]
    for token, logprob, likely in zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True):
        assert len(likely) == 2 and likely[token] == logprob == max(likely.values())


def test_completion_logprobs_0_and_of_drawn_tokens_name_the_token_itself(api: InProcess) -> None:
    said = text(api, logprobs=0)["choices"][0]["logprobs"]
    assert [list(likely) for likely in said["top_logprobs"]] == [[token] for token in said["tokens"]]
    drawn = text(api, logprobs=1, seed=3, **DRAWN)["choices"][0]["logprobs"]
    assert {len(likely) for likely in drawn["top_logprobs"]} == {1, 2}, "one more where the token is not the likeliest"
    assert all(token in likely for token, likely in zip(drawn["tokens"], drawn["top_logprobs"], strict=True))


def test_events_carry_the_logprobs_of_their_tokens(api: InProcess) -> None:
    whole = chat(api, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    events = api.post(CHAT_PATH, CHAT | USAGE | {"logprobs": True, "top_logprobs": 2}).events()
    spoken = [event["choices"][0] for event in events[:-1]]
    assert [token for choice in spoken for token in choice["logprobs"]["content"]] == whole
    assert all(
        "".join(token["token"] for token in choice["logprobs"]["content"]) == choice["delta"]["content"]
        for choice in spoken
    )
    whole = text(api, logprobs=2)["choices"][0]["logprobs"]
    spoken = [
        event["choices"][0]["logprobs"]
        for event in api.post(TEXT_PATH, TEXT | {"stream": True, "logprobs": 2}).events()
    ]
    assert len(spoken) > 1
    assert {name: [value for said in spoken for value in said[name]] for name in whole} == whole


def test_text_that_a_stop_string_holds_back_does_not_hold_back_logprobs(api: InProcess) -> None:
    (full,) = contents(chat(api))
    stop = full[10:14]
    body = chat(api, logprobs=True, stop=stop)
    tokens = body["choices"][0]["logprobs"]["content"]
    assert len(tokens) == body["usage"]["completion_tokens"] == full.index(stop) + 4
    assert contents(body) == [full[: full.index(stop)]]
    events = api.post(CHAT_PATH, CHAT | {"stream": True, "logprobs": True, "stop": stop}).events()
    heard = [event["choices"][0]["logprobs"] for event in events]
    assert [token for one in heard if one for token in one["content"]] == tokens


def test_how_tokens_are_shown(toy: Opened) -> None:
    e, acute, special = 0xC3, 0xA9, toy.tokenizer.eos
    tokens = [TokenLogprob(e, float("-inf"), ((65, -0.5),)), TokenLogprob(acute, -1.0), TokenLogprob(special, -2.0)]
    first, second, last = LogprobForm(toy.tokenizer, chat=True).of(tokens)["content"]
    assert first["token"] == "bytes:\\xc3" and first["bytes"] == [0xC3] and first["logprob"] == LEAST
    assert first["top_logprobs"] == [{"token": "A", "logprob": -0.5, "bytes": [65]}]
    assert second["bytes"] == [0xA9]
    assert last == {"token": "<|im_end|>", "logprob": -2.0, "bytes": None, "top_logprobs": []}
    form = LogprobForm(toy.tokenizer, chat=False)
    assert form.of([TokenLogprob(65, -1.0), *tokens[:1]])["text_offset"] == [0, 1]
    assert form.of([*tokens[1:2], TokenLogprob(66, -1.0)])["text_offset"] == [1, 2], "half a character is none yet"
