from __future__ import annotations

import itertools

import pytest
from engine_server import chat_ids

from ddtree_reference import decode, lossless, startup
from ddtree_reference.decode import Round
from ddtree_reference.method import Method
from ddtree_reference.sequence import Request
from ddtree_reference.startup import Opened

AR, DFLASH = Method("AR"), Method("DFLASH")
PROMPTS = [
    "Write a quicksort in Python",
    "What is 17*23? Show your steps",
    "Write a haiku about programming",
]
REAL_METHODS = [
    DFLASH,
    Method("DFLASH", block_size=16),
    *(Method("DDTREE", budget=b, topk_cap=c) for b, c in [(1, 1), (4, 4), (8, 1), (8, 8), (15, 8), (16, 16), (64, 8)]),
]


def answer(opened: Opened, method: Method, prompt: list[int], tokens: int, eos: int | None) -> list[int]:
    return [token for step in rounds(opened, method, prompt, tokens, eos) for token in step.tokens]


def rounds(opened: Opened, method: Method, prompt: list[int], tokens: int, eos: int | None) -> list[Round]:
    return list(decode.generate(opened.engine, method, Request(tuple(prompt), tokens, eos)))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculation_is_lossless(smollm2: Opened, prompt: str) -> None:
    ids = chat_ids(smollm2, prompt)
    expected = answer(smollm2, AR, ids, 28, smollm2.tokenizer.eos)
    assert len(set(expected)) > 5, "the answer is real text"
    for method in REAL_METHODS:
        assert answer(smollm2, method, ids, 28, smollm2.tokenizer.eos) == expected, lossless.name_of(method)


def test_speculation_is_lossless_behind_a_long_prompt(smollm2: Opened) -> None:
    ids = chat_ids(smollm2, "Summarise: " + "The cat sat on the mat and looked at the dog. " * 30)
    assert len(ids) > decode.PREFILL_CHUNK, "prefill takes two chunks"
    expected = answer(smollm2, AR, ids, 16, smollm2.tokenizer.eos)
    assert answer(smollm2, Method("DDTREE", budget=16), ids, 16, smollm2.tokenizer.eos) == expected


@pytest.mark.parametrize("method", [DFLASH, *lossless.default_methods()[1:]], ids=lossless.name_of)
def test_the_toy_is_lossless_at_every_budget_and_cap(toy: Opened, method: Method) -> None:
    for prompt, tokens in itertools.product(["hello", "Write a poem", "2+2"], [1, 2, 33]):
        ids = chat_ids(toy, prompt)
        assert answer(toy, method, ids, tokens, None) == answer(toy, AR, ids, tokens, None)


def test_fp32_is_lossless_too() -> None:
    opened = startup.open_engine("smollm2", "fp32", [Method("DDTREE", budget=16)])
    assert opened.engine.target.numerics == "fp32"
    ids = chat_ids(opened, "What is 2+2? Answer with just the number")
    expected = answer(opened, AR, ids, 16, opened.tokenizer.eos)
    for method in (DFLASH, Method("DDTREE", budget=8), Method("DDTREE", budget=16)):
        assert answer(opened, method, ids, 16, opened.tokenizer.eos) == expected


def test_the_toys_drafts_are_accepted_now_and_then(toy: Opened) -> None:
    steps = rounds(toy, Method("DDTREE", budget=16), chat_ids(toy, "Write a poem"), 64, None)[1:]
    accepted = [step.accepted for step in steps]
    assert min(accepted) == 0 < max(accepted)


def test_acceptance_of_the_real_drafter(smollm2: Opened) -> None:
    def tau(method: Method) -> float:
        steps = [
            step
            for prompt in PROMPTS
            for step in rounds(smollm2, method, chat_ids(smollm2, prompt), 32, smollm2.tokenizer.eos)[1:]
        ]
        return 1 + sum(step.accepted for step in steps) / len(steps)

    chain, tree16 = tau(DFLASH), tau(Method("DDTREE", budget=16))
    assert chain > 1.3
    assert tree16 > chain


@pytest.mark.parametrize("method", [DFLASH, Method("DDTREE", budget=16)], ids=lossless.name_of)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 30])
def test_max_tokens_cuts_the_last_round_only(toy: Opened, method: Method, tokens: int) -> None:
    steps = rounds(toy, method, chat_ids(toy, "Write a poem"), tokens, None)
    assert sum(len(step.tokens) for step in steps) == tokens
    assert len(steps[0].tokens) == 1 and steps[0].width == 0
    assert all(len(step.tokens) == step.accepted + 1 for step in steps[1:-1])
    assert all(step.width == method.verify_width for step in steps[1:])


def test_eos_ends_the_answer_in_the_middle_of_a_round(toy: Opened) -> None:
    prompt = chat_ids(toy, "Write a poem")
    full = answer(toy, AR, prompt, 60, None)
    for method in (AR, DFLASH, Method("DDTREE", budget=16)):
        for end in sorted(set(full)):
            expected = full[: full.index(end) + 1]
            assert answer(toy, method, prompt, 60, end) == expected


def test_the_smallest_answer_that_ends_by_itself(smollm2: Opened) -> None:
    ids = chat_ids(smollm2, "What is 2+2? Answer with just the number")
    got = answer(smollm2, Method("DDTREE", budget=8), ids, 64, smollm2.tokenizer.eos)
    assert got[-1] == smollm2.tokenizer.eos and len(got) < 64


def test_an_answer_may_fill_the_context_and_no_more(toy: Opened) -> None:
    limit = toy.engine.target.config.max_context
    prompt = [65] * (limit - 20)
    expected = answer(toy, AR, prompt, 20, None)
    assert len(expected) == 20
    assert answer(toy, Method("DDTREE", budget=64), prompt, 20, None) == expected
    with pytest.raises(ValueError, match=f"2028 prompt tokens and 21 new ones.*{limit}"):
        rounds(toy, AR, prompt, 21, None)
    with pytest.raises(ValueError, match="0 prompt tokens"):
        rounds(toy, AR, [], 5, None)


def test_methods_that_cannot_run_are_refused(toy: Opened) -> None:
    with pytest.raises(ValueError, match="budget 0"):
        Method("DDTREE", budget=0)
    with pytest.raises(ValueError, match="top-k cap 0"):
        Method("DDTREE", topk_cap=0)
    with pytest.raises(ValueError, match="block size 1"):
        Method("DFLASH", block_size=1)
    with pytest.raises(ValueError, match="block size 17: the drafter was trained for up to 16"):
        rounds(toy, Method("DFLASH", block_size=17), [65], 4, None)
    with pytest.raises(ValueError, match="verify width 66"):
        rounds(toy, Method("DDTREE", budget=65), [65], 4, None)
    assert Method("DDTREE", budget=4, topk_cap=8).effective_cap == 4
