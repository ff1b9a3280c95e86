"""The self-test at start: is a tree's row bit-identical to the same token decoded alone?

Mixed numerics rest on properties of this CPU's bf16 kernels that no library promises. The test compares hidden states,
logits and chosen tokens of random trees with token-by-token decoding; where they differ, the engine must run in fp32.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_reference import model, tree
from ddtree_reference.model import KVCache, Target

WIDTHS = (2, 5, 8, 9, 16, 17, 33, 65)  # verify widths of the budgets in common use
PATHS = ((1, 2, 3, 4), (1, 2, 5, 6))  # two branches, as nodes of a little tree under node 0
CONTEXT = 40
SEED = 20260

Rows = tuple[Tensor, Tensor, list[int]]  # hidden states [T, dim], logits [T, vocab], chosen tokens


@dataclass(frozen=True)
class Result:
    """Rows compared and rows that differed in any bit, and what the test cost."""

    passed: bool
    rows: int
    differing: int
    widths: tuple[int, ...]
    seconds: float


def run(target: Target, cache: KVCache, width: int) -> Result:
    """Compare rows of trees of `WIDTHS` and `width` nodes with autoregressive rows; the cache is overwritten."""
    began = time.perf_counter()
    rng = random.Random(SEED)
    vocabulary = target.config.vocab_size
    context = torch.tensor([rng.randrange(vocabulary) for _ in range(CONTEXT)])
    causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
    model.forward(target, cache, context, torch.arange(CONTEXT), 0, model.attention_mask(target, causal, 0))
    core_parents = {0: -1} | {node: (0, *path)[at] for path in PATHS for at, node in enumerate(path)}
    core_tokens = {node: rng.randrange(vocabulary) for node in core_parents}
    alone: dict[int, Rows] = {}
    for path in PATHS:
        for depth, node in enumerate((0, *path)):
            alone[node] = _rows(target, cache, [core_tokens[node]], [depth], None)
    compared = differing = 0
    widths = tuple(sorted({*WIDTHS, width} - {1}))
    for nodes in widths:
        parents, tokens, place = _random_tree(rng, nodes, core_parents, core_tokens, vocabulary)
        depths = [0] * nodes
        for node in range(1, nodes):
            depths[node] = depths[parents[node]] + 1
        rows = _rows(target, cache, tokens, depths, parents)
        for core, at in place.items():
            hidden, scores, tokens_chosen = alone[core]
            same = (
                torch.equal(hidden[0], rows[0][at])
                and torch.equal(scores[0], rows[1][at])
                and tokens_chosen[0] == rows[2][at]
            )
            compared, differing = compared + 1, differing + (not same)
    return Result(differing == 0, compared, differing, widths, time.perf_counter() - began)


def _rows(target: Target, cache: KVCache, tokens: list[int], depths: list[int], parents: list[int] | None) -> Rows:
    """Run tree rows behind the context; without `parents`, one row behind `depths[0]` more tokens."""
    start = CONTEXT if parents is not None else CONTEXT + depths[0]
    visible = None if parents is None else torch.from_numpy(tree.visibility(parents))
    mask = None if visible is None else model.attention_mask(target, visible, start)
    positions = torch.tensor(depths) + CONTEXT
    hidden, _ = model.forward(target, cache, torch.tensor(tokens), positions, start, mask)
    scores, normed = model.logits(target, hidden)
    return hidden, scores, model.pick(target, scores, normed)


def _random_tree(
    rng: random.Random, nodes: int, core_parents: dict[int, int], core_tokens: dict[int, int], vocabulary: int
) -> tuple[list[int], list[int], dict[int, int]]:
    """A random tree with as much of the core as fits, its nodes scattered: parents, tokens, core node -> place."""
    parents, tokens, place = [-1], [core_tokens[0]], {0: 0}
    waiting = [node for node in sorted(core_parents) if node > 0]
    while len(parents) < nodes:
        room = nodes - len(parents)
        if waiting and (room <= len(waiting) or rng.random() < 0.4):
            core = waiting.pop(0)
            place[core] = len(parents)
            parents.append(place[core_parents[core]])
            tokens.append(core_tokens[core])
        else:
            parents.append(rng.randrange(len(parents)))
            tokens.append(rng.randrange(vocabulary))
    return parents, tokens, place
