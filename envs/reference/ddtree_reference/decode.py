"""Decoding in rounds: AR, DFLASH and DDTREE over a batch of sequences, each with its own draft tree.

A round drafts, verifies all trees with one target forward and commits. Prefill is the same for all methods, so are the
numbers in the KV cache, and so is the text: speculation changes how many tokens a round commits, never which. AR is
the tree that is only its root.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_reference import drafter as dflash
from ddtree_reference import model, tree
from ddtree_reference.drafter import Drafter
from ddtree_reference.kv_pool import KVPool
from ddtree_reference.method import Method
from ddtree_reference.model import Span, Target
from ddtree_reference.sequence import Request, Running
from ddtree_reference.tree import Tree
from ddtree_reference.walk import Draft, Path, TokenLogprob, walk_all

PREFILL_CHUNK = 256  # prompt tokens of one forward


@dataclass(frozen=True)
class Engine:
    """The models and the memory of up to `pool.total` sequences."""

    target: Target
    drafter: Drafter
    cache: Tensor
    draft_cache: Tensor
    pool: KVPool
    max_width: int


@dataclass(frozen=True)
class Round:
    """Tokens that prefill (`width` 0) or one target forward over `width` rows committed for one sequence.

    `tokens` are cut at EOS and at max_tokens; `accepted` counts accepted drafts before the cut, so that a whole
    round commits accepted + 1 tokens. `tree` is the verified tree of DDTREE.
    """

    tokens: tuple[int, ...]
    accepted: int
    width: int
    tree: Tree | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def verifies(self) -> bool:
        """Whether drafts were verified: neither prefill nor a round of AR."""
        return self.width > 1


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the stages of one batched round."""

    draft: float
    head_topk: float
    tree: float
    verify: float
    commit: float


class _Stopwatch:
    """Seconds since the last call."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def new_engine(
    target: Target, drafter: Drafter, max_width: int, sequences: int = 1, reuse_prefixes: bool = False
) -> Engine:
    """Allocate memory for `sequences` of the longest context and verify widths up to `max_width`."""
    slots = target.config.max_context + max(max_width, drafter.config.max_block_size)
    cache, draft_cache = model.new_cache(target, slots * sequences), dflash.new_cache(drafter, slots * sequences)
    return Engine(target, drafter, cache, draft_cache, KVPool(sequences, slots, reuse_prefixes), max_width)


def check_method(engine: Engine, method: Method) -> None:
    """Raise ValueError if this engine cannot run `method`, naming the value and the bound."""
    largest = engine.drafter.config.max_block_size
    if method.algorithm != "AR" and method.block_size > largest:
        raise ValueError(f"block size {method.block_size}: the drafter was trained for up to {largest}")
    if method.verify_width > engine.max_width:
        raise ValueError(
            f"verify width {method.verify_width} exceeds the {engine.max_width} rows buffers were made for"
        )


def check_request(engine: Engine, request: Request) -> None:
    """Raise ValueError if a request is empty or does not fit into the context."""
    n_prompt, max_context = len(request.prompt), engine.target.config.max_context
    if n_prompt < 1 or request.max_tokens < 1 or n_prompt + request.max_tokens > max_context:
        raise ValueError(
            f"{n_prompt} prompt tokens and {request.max_tokens} new ones: "
            f"at least 1 each, at most {max_context} together"
        )


def admit(engine: Engine, request: Request) -> Running | None:
    """Give a request a region, with what is known of its prompt already in it; None when no region is free."""
    loan = engine.pool.take(request.prompt)
    if loan is None:
        return None
    if loan.cached and loan.source != loan.region.base:
        for cache in (engine.cache, engine.draft_cache):
            kept = cache[:, loan.source : loan.source + loan.cached]
            cache[:, loan.region.base : loan.region.base + loan.cached] = kept
    return Running(request, loan.region, loan.cached)


def leave(engine: Engine, sequence: Running) -> None:
    """Give a sequence's region back."""
    engine.pool.give_back(sequence.region, sequence.tokens[: sequence.filled])


def generate(engine: Engine, method: Method, request: Request) -> Iterator[Round]:
    """Yield the rounds of one answer, prefill's first token first, on an engine with a free region.

    Raises ValueError for what `check_method` and `check_request` refuse, RuntimeError if no region is free.
    """
    check_method(engine, method)
    check_request(engine, request)
    sequence = admit(engine, request)
    if sequence is None:
        raise RuntimeError("no region of the KV cache is free")
    try:
        while not sequence.prefilled:
            for _, first in prefill(engine, method, [sequence]):
                yield first
        while not sequence.finished:
            [step], _ = decode_round(engine, method, [sequence])
            yield step
    finally:
        leave(engine, sequence)


@torch.inference_mode()
def prefill(engine: Engine, method: Method, sequences: Sequence[Running]) -> list[tuple[Running, Round]]:
    """Compute up to PREFILL_CHUNK prompt tokens, the first sequences first; returns those whose prompt is done.

    The first token of an answer comes with the last one of its prompt.
    """
    spans: list[Span] = []
    room = PREFILL_CHUNK
    for sequence in sequences:
        rows = min(room, len(sequence.request.prompt) - sequence.filled)
        if rows == 0:
            break
        spans.append(model.causal_span(engine.target, sequence.region.base, sequence.filled, rows))
        room -= rows
    hidden = _compute_prompts(engine, method, sequences[: len(spans)], spans)
    done, last_rows, row = [], [], 0
    for sequence, span in zip(sequences, spans, strict=False):
        sequence.filled += span.rows
        row += span.rows
        if sequence.filled == len(sequence.request.prompt):
            done.append(sequence)
            last_rows.append(row - 1)
    if not done:
        return []
    paths = walk_all(engine.target, hidden[last_rows], done, [Draft(tree.chain(0), (0,))] * len(done))
    return [
        (sequence, Round(sequence.append((path.token,)), 0, 0, None, path.logprobs))
        for sequence, path in zip(done, paths, strict=True)
    ]


def _compute_prompts(engine: Engine, method: Method, sequences: Sequence[Running], spans: Sequence[Span]) -> Tensor:
    """The forward of the spans' prompt tokens, which the drafter sees too: hidden states [rows, dim]."""
    tokens = [
        token
        for sequence, span in zip(sequences, spans, strict=True)
        for token in sequence.tokens[span.start : span.start + span.rows]
    ]
    positions = torch.cat([torch.arange(span.start, span.start + span.rows) for span in spans])
    hidden, features = model.forward(
        engine.target, engine.cache, torch.tensor(tokens), positions, spans, _feature_layers(engine, method)
    )
    if features is not None:
        dflash.extend(engine.drafter, engine.draft_cache, features, positions, model.slots_of(spans))
    return hidden


def _feature_layers(engine: Engine, method: Method) -> tuple[int, ...]:
    """The layers whose outputs a drafter reads; AR has none."""
    return () if method.algorithm == "AR" else engine.drafter.config.feature_layers


@torch.inference_mode()
def decode_round(engine: Engine, method: Method, sequences: Sequence[Running]) -> tuple[list[Round], StageTimes]:
    """Run one round of every sequence: their committed tokens, and what the stages took together."""
    lap = _Stopwatch()
    draft_s = head_s = tree_s = 0.0
    if method.algorithm == "AR":
        drafts = [Draft(tree.chain(0), (sequence.tokens[-1],)) for sequence in sequences]
    else:
        contexts = [dflash.Context(sequence.region.base, sequence.filled) for sequence in sequences]
        anchors = [sequence.tokens[-1] for sequence in sequences]
        blocks = dflash.propose(engine.drafter, engine.draft_cache, contexts, anchors, method.block_size)
        draft_s = lap()
        best = _best_tokens(engine.drafter, method, blocks)
        head_s = lap()
        drafts = _shape(method, anchors, *best)
        tree_s = lap()
    hidden, features, spans = _verify(engine, method, sequences, drafts)
    paths = walk_all(engine.target, hidden, sequences, drafts)
    verify_s = lap()
    _keep(engine, spans, paths, features)
    rounds = [
        _commit(method, sequence, draft, path) for sequence, draft, path in zip(sequences, drafts, paths, strict=True)
    ]
    return rounds, StageTimes(draft_s, head_s, tree_s, verify_s, lap())


def _best_tokens(drafter: Drafter, method: Method, blocks: Tensor) -> tuple[list[list[float]], list[list[int]]]:
    """Log-probabilities and token ids of the best drafts of each row, [rows, topk_cap]; DFLASH needs the best alone."""
    logits = dflash.draft_logits(drafter, blocks)  # [sequences * (block - 1), draft vocab]
    if method.algorithm == "DFLASH":
        return [], drafter.vocabulary[logits.max(-1, keepdim=True).indices].tolist()
    best, ranked = logits.topk(min(method.effective_cap, logits.shape[-1]), -1)
    log_probs = best - logits.logsumexp(-1, keepdim=True)
    return log_probs.tolist(), drafter.vocabulary[ranked].tolist()


def _shape(
    method: Method, anchors: Sequence[int], log_probs: list[list[float]], choices: list[list[int]]
) -> list[Draft]:
    """The draft of each anchor: a chain, or the best tree of its rows."""
    drafts, depths = [], method.block_size - 1
    for n, anchor in enumerate(anchors):
        rows = slice(n * depths, (n + 1) * depths)
        if method.algorithm == "DFLASH":
            drafts.append(Draft(tree.chain(depths), (anchor, *(best for [best] in choices[rows]))))
            continue
        shape = tree.best_first(log_probs[rows], method.budget)
        nodes = zip(shape.depths[1:], shape.ranks[1:], strict=True)
        drafts.append(Draft(shape, (anchor, *(choices[rows][depth - 1][rank] for depth, rank in nodes))))
    return drafts


def _verify(
    engine: Engine, method: Method, sequences: Sequence[Running], drafts: Sequence[Draft]
) -> tuple[Tensor, Tensor | None, list[Span]]:
    """One target forward over all trees: hidden states and features, [rows of all, ...], and where they were put."""
    spans: list[Span] = []
    tokens: list[int] = []
    positions: list[int] = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        spans.append(model.tree_span(engine.target, sequence.region.base, sequence.filled, draft.tree.parents))
        tokens += draft.tokens
        positions += [sequence.filled + depth for depth in draft.tree.depths]
    layers = _feature_layers(engine, method)
    hidden, features = model.forward(
        engine.target, engine.cache, torch.tensor(tokens), torch.tensor(positions), spans, layers
    )
    return hidden, features, spans


def _keep(engine: Engine, spans: Sequence[Span], paths: Sequence[Path], features: Tensor | None) -> None:
    """Move accepted nodes' keys and values to the front of the new slots, and let the drafter see their features."""
    kept, slots, positions, moved_from, moved_to, first = [], [], [], [], [], 0
    for span, path in zip(spans, paths, strict=True):
        for place, node in enumerate(path.nodes):
            slot = span.base + span.start + place
            kept.append(first + node)
            slots.append(slot)
            positions.append(span.start + place)
            if node != place:
                moved_from.append(slot - place + node)
                moved_to.append(slot)
        first += span.rows
    if moved_to:
        engine.cache[:, moved_to] = engine.cache[:, moved_from]
    if features is not None:
        dflash.extend(engine.drafter, engine.draft_cache, features[kept], torch.tensor(positions), torch.tensor(slots))


def _commit(method: Method, sequence: Running, draft: Draft, path: Path) -> Round:
    """Append what was found to the sequence."""
    tokens = sequence.append((*(draft.tokens[node] for node in path.nodes[1:]), path.token))
    sequence.filled += len(path.nodes)
    return Round(
        tokens,
        accepted=len(path.nodes) - 1,
        width=len(draft.tokens),
        tree=draft.tree if method.algorithm == "DDTREE" else None,
        logprobs=path.logprobs[: len(tokens)],
    )
