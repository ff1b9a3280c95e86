"""The self-test at start: is a tree's row bit-identical to the same token decoded alone?

Mixed numerics rest on properties of this CPU's bf16 kernels that no library promises. The test compares hidden states,
logits, the fp32 scores of the best ones and the chosen tokens of random trees with token-by-token decoding; where they
differ, the engine must run in fp32.

Behind a short context it tries the widths in common use, the same for every method, so that servers of different
methods on one CPU come to the same numerics; behind a long one, where attention reads its keys in several blocks, the
widths that the server's own method verifies with.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_reference import model, tree
from ddtree_reference.decode import Method
from ddtree_reference.model import KVCache, Target

WIDTHS = (2, 5, 8, 9, 16, 17, 33, 65)  # verify widths of the budgets in common use
PATHS = ((1, 2, 3), (1, 4))  # two branches, as nodes of a little tree under node 0
CONTEXT = 40
LONG_CONTEXT = 600
SEED = 20260

Rows = tuple[Tensor, ...]  # hidden states [T, dim], logits [T, vocab], rescored [T, 8], chosen tokens [T]


@dataclass(frozen=True)
class Result:
    """Rows compared and rows that differed in any bit, and what the test cost. `widths` are those of the method."""

    passed: bool
    rows: int
    differing: int
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class _Core:
    """The little tree of `PATHS`, node 0 the root, whose rows are computed alone and inside larger trees."""

    parents: dict[int, int]
    tokens: dict[int, int]


def run(target: Target, cache: KVCache, methods: Sequence[Method]) -> Result:
    """Compare rows of trees with autoregressive rows, as wide as usual and as `methods` have them.

    The cache is overwritten; it must hold LONG_CONTEXT tokens and the widest tree.
    """
    began = time.perf_counter()
    rng = random.Random(SEED)
    own = tuple(sorted({width for method in methods for width in (method.block_size, method.rows)} - {1}))
    parents = {0: -1} | {node: (0, *path)[at] for path in PATHS for at, node in enumerate(path)}
    core = _Core(parents, {node: rng.randrange(target.config.vocab_size) for node in parents})
    compared = differing = 0
    for start, widths in ((CONTEXT, WIDTHS), (LONG_CONTEXT, own)):
        _fill_context(target, cache, rng, start)
        alone = _rows_alone(target, cache, core, start)
        for width in widths:
            parents_of, tokens, place = _random_tree(rng, width, core, target.config.vocab_size)
            rows = _tree_rows(target, cache, tokens, parents_of, start)
            for node, at in place.items():
                same = all(torch.equal(one[0], many[at]) for one, many in zip(alone[node], rows, strict=True))
                compared, differing = compared + 1, differing + (not same)
    contexts = (CONTEXT, LONG_CONTEXT)
    return Result(differing == 0, compared, differing, contexts, own, time.perf_counter() - began)


def _fill_context(target: Target, cache: KVCache, rng: random.Random, length: int) -> None:
    """Put keys and values of `length` tokens into the cache.

    Beyond the first CONTEXT slots they are those of the first ones in random order: a forward of the whole would cost a
    second, and all that matters is that every row reads the same.
    """
    tokens = torch.tensor([rng.randrange(target.config.vocab_size) for _ in range(CONTEXT)])
    causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
    model.forward(target, cache, tokens, torch.arange(CONTEXT), 0, model.attention_mask(target, causal, 0))
    again = torch.tensor([rng.randrange(CONTEXT) for _ in range(length - CONTEXT)], dtype=torch.long)
    cache.k[:, :, CONTEXT:length] = cache.k[:, :, again]
    cache.v[:, :, CONTEXT:length] = cache.v[:, :, again]


def _rows_alone(target: Target, cache: KVCache, core: _Core, start: int) -> dict[int, Rows]:
    """The rows of the core's nodes, decoded token by token behind `start` tokens."""
    alone: dict[int, Rows] = {}
    for path in PATHS:
        for depth, node in enumerate((0, *path)):
            if node in alone:  # its key and value are in place already
                continue
            at = start + depth
            hidden, _ = model.forward(target, cache, torch.tensor([core.tokens[node]]), torch.tensor([at]), at, None)
            alone[node] = _results(target, hidden)
    return alone


def _tree_rows(target: Target, cache: KVCache, tokens: list[int], parents: list[int], start: int) -> Rows:
    """The rows of a whole tree behind `start` tokens."""
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    mask = model.attention_mask(target, torch.from_numpy(tree.visibility(parents)), start)
    positions = torch.tensor(depths) + start
    hidden, _ = model.forward(target, cache, torch.tensor(tokens), positions, start, mask)
    return _results(target, hidden)


def _results(target: Target, hidden: Tensor) -> Rows:
    scores, normed = model.logits(target, hidden)
    chosen = torch.tensor(model.pick(target, scores, normed))
    return hidden, scores, *model.rescore(target, scores, normed), chosen


def _random_tree(
    rng: random.Random, nodes: int, core: _Core, vocabulary: int
) -> tuple[list[int], list[int], dict[int, int]]:
    """A random tree with as much of the core as fits, its nodes scattered: parents, tokens, core node -> place."""
    parents, tokens, place = [-1], [core.tokens[0]], {0: 0}
    waiting = [node for node in sorted(core.parents) if node > 0]
    while len(parents) < nodes:
        room = nodes - len(parents)
        if waiting and (room <= len(waiting) or rng.random() < 0.4):
            node = waiting.pop(0)
            place[node] = len(parents)
            parents.append(place[core.parents[node]])
            tokens.append(core.tokens[node])
        else:
            parents.append(rng.randrange(len(parents)))
            tokens.append(rng.randrange(vocabulary))
    return parents, tokens, place
