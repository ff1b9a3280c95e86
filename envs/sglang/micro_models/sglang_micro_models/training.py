"""Training of a target and of its drafter, from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_micro_models import corpus, targets, tokenizer
from sglang_micro_models.drafter import Drafter, DrafterConfig
from sglang_micro_models.identity import Identity

THREADS = 1  # fixed, because the number of threads decides the order of sums and so the last bits of the weights
ANCHORS = 8  # blocks a row in the drafter's training


@dataclass(frozen=True)
class Recipe:
    """How long and how hard to train."""

    target_steps: int = 400
    drafter_steps: int = 500
    rows_per_step: int = 16
    rows: int = 3000
    peak_rate: float = 3e-3
    warm_up: int = 30


class Pair(NamedTuple):
    """A trained target and its drafter."""

    target: targets.Target
    drafter: Drafter


def train(identity: Identity, recipe: Recipe) -> Pair:
    """Train the pair of an identity. Sets torch's thread count and global seed."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(identity.seed)
    rows = corpus.rows(identity.seed, recipe.rows)
    target = targets.build(identity.kind)
    train_target(target, rows, recipe)
    drafter = new_drafter(target, identity.block_size)
    train_drafter(drafter, target, rows, recipe)
    return Pair(target, drafter)


def train_target(target: targets.Target, rows: Tensor, recipe: Recipe) -> None:
    """Train by next-token prediction, in place; `rows` int64 [N, T]."""
    model = target.model.train()
    for batch in _steps(model, rows, recipe.target_steps, recipe):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    model.eval().requires_grad_(False)


def new_drafter(target: targets.Target, block_size: int) -> Drafter:
    """An untrained drafter for `target`."""
    config = target.model.config
    return Drafter(
        DrafterConfig(
            hidden=config.hidden_size,
            block_size=block_size,
            target_layers=config.num_hidden_layers,
            feature_layers=target.feature_layers,
        )
    )


def train_drafter(drafter: Drafter, target: targets.Target, rows: Tensor, recipe: Recipe) -> None:
    """Train to predict the tokens of blocks at random anchors, in place; the target stays as it is."""
    block = drafter.config.block_size
    for batch in _steps(drafter, rows, recipe.drafter_steps, recipe):
        anchors = torch.randint(1, batch.shape[1] - block + 1, (batch.shape[0], ANCHORS))
        wanted = batch[:, None].expand(-1, ANCHORS, -1).gather(2, anchors[:, :, None] + torch.arange(block))
        logits = draft_logits(drafter, target, features(target, batch), anchors, wanted[:, :, 0])
        F.cross_entropy(logits.flatten(0, 2), wanted[:, :, 1:].flatten()).backward()
    drafter.eval().requires_grad_(False)


@torch.no_grad()
def features(target: targets.Target, ids: Tensor) -> Tensor:
    """Hidden states after the target's feature layers, side by side, [B, S, features * hidden]; `ids` [B, S]."""
    hidden = target.model.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[layer + 1] for layer in target.feature_layers], -1)


def draft_logits(drafter: Drafter, target: targets.Target, seen: Tensor, anchors: Tensor, first: Tensor) -> Tensor:
    """Logits of the drafts of A blocks a row, [B, A, block - 1, vocab].

    `seen` are the `features` [B, S, ...] of the rows; `anchors` [B, A] the positions of the blocks' first tokens,
    whose ids are `first` [B, A].
    """
    ids = torch.full((*first.shape, drafter.config.block_size), tokenizer.MASK_ID)
    ids[:, :, 0] = first
    embedded = target.model.get_input_embeddings()(ids)
    return target.model.get_output_embeddings()(drafter(seen, anchors, embedded))


def _steps(module: nn.Module, rows: Tensor, steps: int, recipe: Recipe) -> Iterator[Tensor]:
    """Batches of rows; after each, the gradients that the caller left in `module` are applied.

    AdamW, gradients clipped at 1, rate up to its peak in `warm_up` steps and down to a twentieth in a line.
    """
    optimizer = torch.optim.AdamW(module.parameters(), recipe.peak_rate, weight_decay=0.01)
    for step in range(steps):
        rate = recipe.peak_rate * min(1.0, (step + 1) / recipe.warm_up) * (1 - 0.95 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        yield rows[torch.randint(rows.shape[0], (recipe.rows_per_step,))]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
