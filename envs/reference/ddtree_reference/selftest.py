"""The self-test at start: is a tree's row bit-identical to the same token decoded alone?

Mixed numerics rest on properties of this CPU's bf16 kernels that no library promises. The test compares hidden states,
logits, the fp32 scores of the best ones and the chosen tokens of random trees with token-by-token decoding; where they
differ, the engine must run in fp32.

Behind a short context it tries the widths in common use, the same for every method, so that servers of different
methods on one CPU come to the same numerics; behind a long one, where attention reads its keys in several blocks, the
widths that the server's own method verifies with: alone, as the last of two, three and as many sequences as may run,
and behind as many rows as prompts are computed with.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_reference import model
from ddtree_reference.method import Method
from ddtree_reference.model import Span, Target

WIDTHS = (2, 5, 8, 9, 16, 17, 33, 65)  # verify widths of the budgets in common use
PATHS = ((1, 2, 3), (1, 4))  # two branches, as nodes of a little tree under node 0
CONTEXT = 40
LONG_CONTEXT = 600
MAX_BATCH_ROWS = 512  # more would cost every start a second
PREFILL_ROWS = (100, 256)
SEED = 20260

Rows = tuple[Tensor, ...]  # hidden states [T, dim], logits [T, vocab], rescored [T, 8], chosen tokens [T]


@dataclass(frozen=True)
class Result:
    """Rows compared and rows that differed in any bit, and what the test cost.

    `widths` are those of the methods, `batch_rows` the rows of the batches they were tried in.
    """

    passed: bool
    rows: int
    differing: int
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    batch_rows: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class _Core:
    """The little tree of `PATHS`, node 0 the root, whose rows are computed alone and inside larger trees."""

    parents: dict[int, int]
    tokens: dict[int, int]


def run(target: Target, methods: Sequence[Method], sequences: int = 1) -> Result:
    """Compare rows of trees with autoregressive rows, as wide as usual and as `sequences` of `methods` have them."""
    began = time.perf_counter()
    rng = random.Random(SEED)
    far = min(LONG_CONTEXT, target.config.max_context - CONTEXT)
    own = sorted({width for method in methods for width in (method.block_size, method.rows)})
    widths = tuple(width for width in own if width > 1)
    batches = _batches(own, sequences)
    cases = [(CONTEXT, width, width) for width in WIDTHS] + [(far, width, width) for width in widths]
    cases += [(far, width, rows) for width, rows in batches]
    parents = {0: -1} | {node: (0, *path)[at] for path in PATHS for at, node in enumerate(path)}
    core = _Core(parents, {node: rng.randrange(target.config.vocab_size) for node in parents})
    cache = model.new_cache(target, LONG_CONTEXT + max(rows for _, _, rows in cases) + len(PATHS[0]))
    compared = differing = 0
    for context in dict.fromkeys((CONTEXT, far)):
        _fill_context(target, cache, rng, context)
        alone = _rows_alone(target, cache, core, context)
        for _, width, total in (case for case in cases if case[0] == context):
            parents_of, tokens, place = _random_tree(rng, width, core, target.config.vocab_size)
            rows = _tree_rows(target, cache, tokens, parents_of, context, total - width)
            for node, at in place.items():
                same = all(torch.equal(one[0], many[at]) for one, many in zip(alone[node], rows, strict=True))
                compared, differing = compared + 1, differing + (not same)
    return Result(
        passed=differing == 0,
        rows=compared,
        differing=differing,
        contexts=(CONTEXT, far),
        widths=widths,
        batch_rows=tuple(sorted({rows for _, rows in batches})),
        seconds=time.perf_counter() - began,
    )


def _batches(widths: Sequence[int], sequences: int) -> list[tuple[int, int]]:
    """Widths, and the rows of all sequences together, of batches that a server runs."""
    counts = {min(count, sequences) for count in (2, 3, sequences)} - {1}
    full = {(width, min(width * count, MAX_BATCH_ROWS)) for width in widths for count in counts}
    prompts = {(widths[-1], rows) for rows in PREFILL_ROWS}
    return sorted((width, rows) for width, rows in full | prompts if rows > width)


def _fill_context(target: Target, cache: Tensor, rng: random.Random, length: int) -> None:
    """Put keys and values of `length` tokens into the cache.

    Beyond the first CONTEXT slots they are those of the first ones in random order: a forward of the whole would cost a
    second, and all that matters is that every row reads the same.
    """
    tokens = torch.tensor([rng.randrange(target.config.vocab_size) for _ in range(CONTEXT)])
    model.forward(target, cache, tokens, torch.arange(CONTEXT), [model.causal_span(target, 0, 0, CONTEXT)])
    again = torch.tensor([rng.randrange(CONTEXT) for _ in range(length - CONTEXT)], dtype=torch.long)
    cache[:, CONTEXT:length] = cache[:, again]


def _rows_alone(target: Target, cache: Tensor, core: _Core, start: int) -> dict[int, Rows]:
    """The rows of the core's nodes, decoded token by token behind `start` tokens."""
    alone: dict[int, Rows] = {}
    for path in PATHS:
        for depth, node in enumerate((0, *path)):
            if node in alone:  # its key and value are in place already
                continue
            at, token = start + depth, torch.tensor([core.tokens[node]])
            hidden, _ = model.forward(target, cache, token, torch.tensor([at]), [Span(0, at, 1, None)])
            alone[node] = _results(target, hidden)
    return alone


def _tree_rows(target: Target, cache: Tensor, tokens: list[int], parents: list[int], start: int, others: int) -> Rows:
    """The rows of a whole tree behind `start` tokens, computed as the last ones behind `others` of another sequence."""
    width, depths = len(parents), [0] * len(parents)
    for node in range(1, width):
        depths[node] = depths[parents[node]] + 1
    spans = [model.tree_span(target, 0, start, parents)]
    if others:
        spans.insert(0, model.causal_span(target, start + width, 0, others))
    positions = torch.cat([torch.arange(others) % target.config.max_context, torch.tensor(depths) + start])
    batch = (tokens * (others // width + 1))[:others] + tokens
    hidden, _ = model.forward(target, cache, torch.tensor(batch), positions, spans)
    return tuple(rows[others:] for rows in _results(target, hidden))


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
