"""What one training step learns from: a function of the data, the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ddtree_training.dataset import Recorded

GROUP_BATCHES = 16  # batches whose answers are sorted by length together


@dataclass(frozen=True)
class Shape:
    """A step's size: `anchors` blocks of `block` tokens in each of `sequences` answers."""

    sequences: int
    anchors: int
    block: int


@dataclass(frozen=True)
class Blocks:
    """Blocks of a batch of answers, and what their masks should say.

    `features` bf16 [B, S, features * dim] reach to the last anchor, padded with zeros; `anchors` and `anchor_tokens`
    are int64 [B, A]; `rows` int64 [R] are those of the B * A * (block - 1) masks that stand on a token of the answer,
    `depths` their places in the block, from 0; `positions` the places of their tokens in the answer, `owners` their
    sequences.
    """

    features: Tensor
    anchors: Tensor
    anchor_tokens: Tensor
    rows: Tensor
    depths: Tensor
    positions: Tensor
    owners: Tensor


def shape_of(step: int, seed: int, sequences: int, anchors: int, block: int, long_share: float) -> Shape:
    """The shape of a step: in a share of the steps blocks are twice as long, and half as many."""
    if np.random.default_rng((seed, step, 1)).random() < long_share:
        return Shape(sequences, max(1, anchors // 2), 2 * block)
    return Shape(sequences, anchors, block)


def answers_of(step: int, seed: int, lengths: tuple[int, ...], sequences: int) -> list[int]:
    """Indices of a step's answers: every epoch takes each once, in random batches of about one length."""
    n_batches = max(1, len(lengths) // sequences)
    epoch, number = divmod(step, n_batches)
    return list(_epoch(epoch, seed, lengths, sequences)[number])


@lru_cache(maxsize=2)
def _epoch(epoch: int, seed: int, lengths: tuple[int, ...], sequences: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng((seed, epoch, 2))
    order = random.permutation(len(lengths))
    batches = []
    size = sequences * GROUP_BATCHES
    for start in range(0, len(order), size):
        group = sorted(order[start : start + size].tolist(), key=lambda i: (lengths[i], i))
        batches += [tuple(group[i : i + sequences]) for i in range(0, len(group), sequences)]
    whole = [batch for batch in batches if len(batch) == sequences] or batches
    return [whole[i] for i in random.permutation(len(whole))]


def draw_anchors(answer: Recorded, count: int, random: np.random.Generator) -> list[int]:
    """Positions, ascending, of `count` answer tokens that have one behind them; each once if there are enough."""
    places = answer.length - 1 - answer.prompt_length
    drawn = random.choice(places, count, replace=places < count)
    return sorted((drawn + answer.prompt_length).tolist())


def lay_out(answers: Sequence[Recorded], anchors: Sequence[Sequence[int]], block: int) -> Blocks:
    """Blocks at the given anchors, as many in every answer."""
    places = torch.tensor(anchors)  # [B, A]
    width = answers[0].features.shape[1]
    features = torch.zeros(len(answers), int(places.max()), width, dtype=torch.bfloat16)
    for i, answer in enumerate(answers):
        length = int(places[i].max())
        features[i, :length] = answer.features[:length]
    anchor_tokens = torch.stack([answer.tokens.long()[places[i]] for i, answer in enumerate(answers)])
    following = places[:, :, None] + torch.arange(1, block)  # [B, A, block - 1]
    lengths = torch.tensor([answer.length for answer in answers])
    rows = (following < lengths[:, None, None]).flatten().nonzero()[:, 0]
    owners = rows // (places.shape[1] * (block - 1))
    prompts = torch.tensor([answer.prompt_length for answer in answers])
    positions = following.flatten()[rows] - prompts[owners]
    return Blocks(features, places, anchor_tokens, rows, rows % (block - 1), positions, owners)


def answers_and_blocks(
    answers: Sequence[Recorded], lengths: tuple[int, ...], step: int, seed: int, shape: Shape
) -> tuple[list[Recorded], Blocks]:
    """A step's answers, and blocks at random anchors in them; `lengths` are those of all answers."""
    chosen = [answers[i] for i in answers_of(step, seed, lengths, shape.sequences)]
    random = np.random.default_rng((seed, step, 3))
    return chosen, lay_out(chosen, [draw_anchors(answer, shape.anchors, random) for answer in chosen], shape.block)
