"""Whether a server's greedy answers are those of Hugging Face in float32, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_server import SGLangServer
from tokenizers import Tokenizer

from sglang_micro_models import language
from sglang_micro_models.identity import DEFAULT_SEED

STRANGE = 2
"""Prompts of random ids among those of `prompts`; the model answers them with little variety."""


def prompts(model: Path, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 60 ids in the language of a micro model, and `STRANGE` of random ids.

    No two have the same length, so that a mask which is another request's shows.
    """
    source = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    grammar = language.make_grammar(DEFAULT_SEED)
    lengths = source.sample(range(1, 61), count)
    found = [tokenizer.encode(_text(grammar, source, length)).ids[:length] for length in lengths[STRANGE:]]
    return found + [[source.randrange(200) for _ in range(length)] for length in lengths[:STRANGE]]


def _text(grammar: language.Grammar, source: random.Random, length: int) -> str:
    text = ""
    while len(text) < 3 * length:
        text += language.answer(grammar, source) + " "
    return text


def greedy(tokens: int) -> dict[str, Any]:
    """Sampling parameters of `tokens` greedy tokens, whatever they are."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def in_one_batch(server: SGLangServer, inputs: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """The answers to all prompts sent together."""
    answers: list[dict[str, Any]] = server.generate(input_ids=inputs, sampling_params=greedy(tokens))
    return answers


def one_by_one(server: SGLangServer, inputs: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """The answers to prompts sent one after another."""
    return [server.generate(input_ids=ids, sampling_params=greedy(tokens)) for ids in inputs]


def differing(answers: Sequence[dict[str, Any]], expected: Sequence[Sequence[int]]) -> int:
    """Tokens that differ between answers and what was expected, one that is missing or too many among them."""
    return sum(_differing(answer["output_ids"], wanted) for answer, wanted in zip(answers, expected, strict=True))


def _differing(found: Sequence[int], wanted: Sequence[int]) -> int:
    same = sum(a == b for a, b in zip(found, wanted, strict=False))
    return max(len(found), len(wanted)) - same


def tokens_per_round(answers: Sequence[dict[str, Any]]) -> float:
    """Tokens that a verified round committed, pooled over answers; the first token of each comes from prefill."""
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / rounds
