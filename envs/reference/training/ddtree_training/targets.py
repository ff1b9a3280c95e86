"""What masks should say: the target's greedy token, its likely tokens, or a mix of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_training.batches import Blocks
from ddtree_training.dataset import Recorded


@dataclass(frozen=True)
class Targets:
    """Sparse targets of R rows: places in the draft vocabulary `ids` int64 [R, 17], their weights, fp32 [R, 17].

    A row's weights sum to the row's own weight; `total` is the sum of them all.
    """

    ids: Tensor
    weights: Tensor
    total: float


def draft_index(vocabulary: Tensor, vocab_size: int) -> Tensor:
    """The place of every token in the draft vocabulary, -1 for those not in it, int64 [vocab]."""
    index = torch.full((vocab_size,), -1)
    index[vocabulary] = torch.arange(vocabulary.shape[0])
    return index


def greedy(blocks: Blocks, answers: Sequence[Recorded], index: Tensor) -> Tensor:
    """The place in the draft vocabulary of each row's greedy token, int64 [R], -1 if it is not there."""
    return index[_at(blocks, [answer.tokens[answer.prompt_length :] for answer in answers]).long()]


def build(blocks: Blocks, answers: Sequence[Recorded], index: Tensor, soft_share: float, decay: float) -> Targets:
    """The greedy token and, for `soft_share` of the weight, the likely tokens renormalised over the draft vocabulary.

    A mask at depth k (from 0) weighs exp(-k / decay), as in DFlash. A row without a token to say weighs nothing.
    """
    hard = greedy(blocks, answers, index)[:, None]
    soft = index[_at(blocks, [answer.top_ids for answer in answers]).long()]  # [R, 16]
    likely = _at(blocks, [answer.top_log_probs for answer in answers]).float().exp().masked_fill(soft < 0, 0.0)
    likely = likely / likely.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    shares = torch.cat([(hard >= 0) * (1.0 - soft_share), likely * soft_share], -1)
    weights = shares * torch.exp(-blocks.depths / decay)[:, None]
    return Targets(torch.cat([hard, soft], -1).clamp_min(0), weights, float(weights.sum()))


def _at(blocks: Blocks, parts: Sequence[Tensor]) -> Tensor:
    """Rows of the answers' tensors, at the positions of the masks."""
    starts = torch.tensor([0, *(part.shape[0] for part in parts[:-1])]).cumsum(0)
    return torch.cat(list(parts))[starts[blocks.owners] + blocks.positions]
