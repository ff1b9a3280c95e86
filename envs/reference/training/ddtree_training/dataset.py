"""Recorded answers for training: shards mapped to memory, the split by prompt, the draft vocabulary."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ddtree_training import features
from ddtree_training.features import Entry


@dataclass(frozen=True)
class Recorded:
    """One answer with what the target thought, for a prompt of P and altogether n tokens.

    `tokens` is int32 [n]; `features` bf16 [n - 1, features * dim], of every token but the last; `top_ids` int32 and
    `top_log_probs` fp16 [n - P, 16]: the most probable tokens at each position of the answer, best first.
    """

    id: str
    category: str
    prompt: str
    prompt_length: int
    tokens: Tensor
    features: Tensor
    top_ids: Tensor
    top_log_probs: Tensor

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.tokens.shape[0]


@dataclass(frozen=True)
class Split:
    """Answers to train on and answers held out; no prompt is on both sides."""

    training: tuple[Recorded, ...]
    validation: tuple[Recorded, ...]


def load(shards: Sequence[Path]) -> list[Recorded]:
    """All answers of the shards; their tensors are read from disk as they are used."""
    return [answer for shard in shards for answer in _load_shard(shard)]


def _load_shard(shard: Path) -> list[Recorded]:
    with safe_open(shard, framework="pt") as file:
        tokens, rows, ids, log_probs = map(file.get_tensor, ("tokens", "features", "top_ids", "top_log_probs"))
    return [
        _cut(entry, entry.start - i, tokens, rows, ids, log_probs) for i, entry in enumerate(features.entries(shard))
    ]


def _cut(entry: Entry, row: int, tokens: Tensor, rows: Tensor, ids: Tensor, log_probs: Tensor) -> Recorded:
    """One answer's part of a shard; its features start at `row`."""
    in_answer = slice(entry.answer_start, entry.answer_start + entry.length - entry.prompt_length)
    return Recorded(
        id=entry.id,
        category=entry.category,
        prompt=entry.prompt,
        prompt_length=entry.prompt_length,
        tokens=tokens[entry.start : entry.start + entry.length],
        features=rows[row : row + entry.length - 1],
        top_ids=ids[in_answer],
        top_log_probs=log_probs[in_answer],
    )


def split(answers: Sequence[Recorded], held_out: float) -> Split:
    """Hold out the answers of a share of the prompts, at least one: those whose SHA-256 is lowest.

    Raises ValueError if there are fewer than two prompts.
    """
    prompts = sorted({answer.prompt for answer in answers}, key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompts with answers: at least 2, one to hold out; generate more answers")
    held = set(prompts[: max(1, min(math.ceil(held_out * len(prompts)), len(prompts) - 1))])
    return Split(
        tuple(answer for answer in answers if answer.prompt not in held),
        tuple(answer for answer in answers if answer.prompt in held),
    )


def commonest_tokens(answers: Sequence[Recorded], vocab_size: int, size: int) -> Tensor:
    """The ids, ascending, of the `size` commonest tokens of the answers; of equally common ones, the lower ids."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for answer in answers:
        counts += torch.bincount(answer.tokens[answer.prompt_length :].long(), minlength=vocab_size)
    order = counts.sort(descending=True, stable=True).indices
    return order[: min(size, vocab_size)].sort().values
