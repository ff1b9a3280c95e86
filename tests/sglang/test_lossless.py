"""DDTREE on the real server: greedy answers equal Hugging Face's in float32, whatever happens to the batch.

An answer longer than some 30 tokens is needed: a path whose KV is not moved to the front shows only later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hugging_face_greedy import greedy as hugging_face
from lossless import STRANGE, differing, greedy, in_one_batch, one_by_one, prompts, tokens_per_round
from sglang_server import SGLangServer
from trained_models import ModelPair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 64


@pytest.fixture(scope="module")
def inputs(plain_model: ModelPair) -> list[list[int]]:
    return prompts(plain_model.target, 8)


@pytest.fixture(scope="module")
def expected(sglang_python: Path, plain_model: ModelPair, inputs: list[list[int]]) -> list[list[int]]:
    return hugging_face(sglang_python, plain_model.target, inputs, TOKENS)


@pytest.fixture(scope="module")
def tree8(plain_model: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    with SGLangServer(
        plain_model.target,
        drafter_path=plain_model.drafter,
        algorithm="DDTREE",
        budget=8,
        extra_args=["--max-running-requests", "8"],
        log_path=tmp_path_factory.mktemp("tree8") / "log",
    ) as server:
        yield server


def test_the_models_own_tokens_are_worth_a_test(expected: list[list[int]]) -> None:
    """Answers that repeat one token, or never use id 0, would hide what these tests look for."""
    assert all(len(set(answer)) > 8 for answer in expected[:-STRANGE])
    assert any(0 in answer for answer in expected)


def test_eight_prompts_in_one_batch(tree8: SGLangServer, inputs: list[list[int]], expected: list[list[int]]) -> None:
    answers = in_one_batch(tree8, inputs, TOKENS)
    assert differing(answers, expected) == 0
    assert tokens_per_round(answers) > 1.5


def test_alone(tree8: SGLangServer, inputs: list[list[int]], expected: list[list[int]]) -> None:
    assert differing(one_by_one(tree8, inputs[:3], TOKENS), expected[:3]) == 0


def test_requests_that_join_and_leave(tree8: SGLangServer, inputs: list[list[int]], expected: list[list[int]]) -> None:
    lengths = (5, 64, 17, 40, 1, 33, 64, 2)

    def answer(n: int) -> dict[str, object]:
        time.sleep(n * 0.3)
        found: dict[str, object] = tree8.generate(input_ids=inputs[n], sampling_params=greedy(lengths[n]))
        return found

    with ThreadPoolExecutor(8) as users:
        answers = list(users.map(answer, range(8)))
    assert differing(answers, [ids[:n] for ids, n in zip(expected, lengths, strict=True)]) == 0


@pytest.mark.parametrize("tokens", [1, 2, 3, 6])
def test_max_tokens_inside_a_round(
    tree8: SGLangServer, inputs: list[list[int]], expected: list[list[int]], tokens: int
) -> None:
    answers = in_one_batch(tree8, inputs, tokens)
    assert [answer["output_ids"] for answer in answers] == [ids[:tokens] for ids in expected]


def test_a_stop_token_inside_a_round_ends_the_answer_there(
    tree8: SGLangServer, inputs: list[list[int]], expected: list[list[int]]
) -> None:
    places = [next(n for n in range(8, TOKENS) if ids[n] not in ids[:n]) for ids in expected]
    params = [
        {**greedy(TOKENS), "stop_token_ids": [ids[n]], "ignore_eos": False}
        for ids, n in zip(expected, places, strict=True)
    ]
    answers = tree8.generate(input_ids=inputs, sampling_params=params)
    for answer, ids, n in zip(answers, expected, places, strict=True):
        reason = answer["meta_info"]["finish_reason"]
        if reason["matched"] == ids[n]:  # else the model's own end of text came first
            assert answer["output_ids"] == ids[: n + 1]
        else:
            assert answer["output_ids"] == ids[: len(answer["output_ids"])]


def test_an_answer_goes_on_from_the_prefix_cache(
    tree8: SGLangServer, inputs: list[list[int]], expected: list[list[int]]
) -> None:
    """What a round has committed is what a later request finds: the path's KV, not the tree's first nodes."""
    longer = [prompt + ids[:40] for prompt, ids in zip(inputs, expected, strict=True)]
    answers = in_one_batch(tree8, longer, TOKENS - 40)
    assert differing(answers, [ids[40:] for ids in expected]) == 0
    assert all(answer["meta_info"]["cached_tokens"] > len(p) for answer, p in zip(answers, inputs, strict=True))


def test_pages_chunked_prefill_and_retraction(
    plain_model: ModelPair, inputs: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """Budget 32 over block 8: the case that crashed. The pool is too small for eight answers at once."""
    with SGLangServer(
        plain_model.target,
        drafter_path=plain_model.drafter,
        algorithm="DDTREE",
        budget=32,
        extra_args=[
            *("--page-size", "16", "--chunked-prefill-size", "32", "--max-total-tokens", "1024"),
            *("--max-running-requests", "8", "--schedule-conservativeness", "0.1"),
        ],
        log_path=tmp_path / "log",
    ) as server:
        answers = in_one_batch(server, inputs, TOKENS)
        info = server.server_info()
        log = server.log()
    assert differing(answers, expected) == 0
    assert (info["speculative_ddtree_budget"], info["speculative_num_draft_tokens"]) == (32, 33)
    assert info["speculative_dflash_block_size"] == 8
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0 or "retract" in log.lower()


def test_answers_that_fill_the_context_to_its_end(
    sglang_python: Path, plain_model: ModelPair, inputs: list[list[int]], tmp_path: Path
) -> None:
    """At the end of the context two rounds reserve slots beyond it; they must not be another request's.

    They would be the next request's first ones, so that the request that ends first comes before those that go on.
    """
    context = 64
    chosen = sorted(inputs, key=len, reverse=True)[2:6]
    assert all(len(prompt) < context - 8 for prompt in chosen)
    with SGLangServer(
        plain_model.target,
        drafter_path=plain_model.drafter,
        algorithm="DDTREE",
        budget=16,
        extra_args=["--context-length", str(context), "--max-running-requests", "4"],
        log_path=tmp_path / "log",
    ) as server:
        answers = server.generate(
            input_ids=chosen, sampling_params=[greedy(context - len(prompt)) for prompt in chosen]
        )
    lengths = [context - 2 - len(prompt) for prompt in chosen]
    wanted = hugging_face(sglang_python, plain_model.target, chosen, max(lengths))
    assert differing(answers, [ids[:n] for ids, n in zip(wanted, lengths, strict=True)]) == 0
