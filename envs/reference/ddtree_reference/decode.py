"""Greedy decoding: AR, DFLASH and DDTREE as rounds of one sequence.

A round drafts, verifies with one target forward and commits. Prefill is the same for all methods, so are the numbers
in the KV cache, and so is the text: speculation changes how many tokens a round commits, never which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ddtree_reference import drafter as dflash
from ddtree_reference import model, tree
from ddtree_reference.drafter import Drafter
from ddtree_reference.model import KVCache, Target
from ddtree_reference.tree import Tree

Algorithm = Literal["AR", "DFLASH", "DDTREE"]

PREFILL_CHUNK = 256  # prompt tokens of one forward
MAX_BUDGET = 1024


@dataclass(frozen=True)
class Method:
    """How tokens are proposed. `budget` counts tree nodes without the root, `topk_cap` the tokens kept a depth."""

    algorithm: Algorithm = "AR"
    block_size: int = 8
    budget: int = 8
    topk_cap: int = 8

    def __post_init__(self) -> None:
        """Raise ValueError for numbers no engine can run, naming the value and the bounds."""
        if self.block_size < 2:
            raise ValueError(f"block size {self.block_size}: at least 2, the anchor and one draft")
        if not 1 <= self.budget <= MAX_BUDGET:
            raise ValueError(f"budget {self.budget}: 1 to {MAX_BUDGET}")
        if self.topk_cap < 1:
            raise ValueError(f"top-k cap {self.topk_cap}: at least 1")

    @property
    def verify_width(self) -> int:
        """Rows of a round's target forward: 1 for AR, the block for DFLASH, budget + 1 for DDTREE."""
        return {"AR": 1, "DFLASH": self.block_size, "DDTREE": self.budget + 1}[self.algorithm]

    @property
    def rows(self) -> int:
        """Rows a round's forward really has: verify_width, or fewer where the cap leaves no more paths."""
        if self.algorithm != "DDTREE":
            return self.verify_width
        return 1 + min(self.budget, sum(self.effective_cap**depth for depth in range(1, self.block_size)))

    @property
    def effective_cap(self) -> int:
        """The cap that can matter: a node of rank r has r better siblings in the tree, so ranks stay below budget."""
        return min(self.topk_cap, self.budget)


@dataclass(frozen=True)
class Engine:
    """The models and the buffers of one sequence; generating on it again overwrites the buffers."""

    target: Target
    drafter: Drafter
    cache: KVCache
    context: dflash.Context
    max_width: int


@dataclass(frozen=True)
class Round:
    """Tokens committed by prefill (`width` 0) or by one target forward over `width` rows.

    `tokens` are cut at EOS and at max_tokens; `accepted` counts accepted drafts before the cut, so that a whole
    round commits accepted + 1 tokens. `tree` is the verified tree of DDTREE.
    """

    tokens: tuple[int, ...]
    accepted: int
    width: int
    tree: Tree | None = None

    @property
    def verifies(self) -> bool:
        """Whether drafts were verified: neither prefill nor a round of AR."""
        return self.width > 1


def new_engine(target: Target, drafter: Drafter, max_width: int) -> Engine:
    """Allocate buffers for the longest context and verify widths up to `max_width`."""
    slots = target.config.max_context + max(max_width, drafter.config.max_block_size)
    return Engine(target, drafter, model.new_cache(target, slots), dflash.new_context(drafter, slots), max_width)


def check_method(engine: Engine, method: Method) -> None:
    """Raise ValueError if this engine cannot run `method`, naming the value and the bound."""
    largest = engine.drafter.config.max_block_size
    if method.algorithm != "AR" and method.block_size > largest:
        raise ValueError(f"block size {method.block_size}: the drafter was trained for up to {largest}")
    if method.verify_width > engine.max_width:
        raise ValueError(
            f"verify width {method.verify_width} exceeds the {engine.max_width} rows buffers were made for"
        )


def generate(
    engine: Engine, method: Method, prompt: Sequence[int], max_tokens: int, eos: int | None = None
) -> Iterator[Round]:
    """Yield the rounds of the greedy answer to `prompt`, prefill's first token first.

    Ends after `max_tokens` tokens or with the token `eos` (None: never). Raises ValueError if the prompt is empty or
    does not fit into the context together with max_tokens.
    """
    check_method(engine, method)
    max_context = engine.target.config.max_context
    if not prompt or max_tokens < 1 or len(prompt) + max_tokens > max_context:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {max_tokens} new ones: at least 1 each, at most {max_context} together"
        )
    token = prefill(engine, method, prompt)
    yield Round((token,), 0, 0)
    done = 1
    while done < max_tokens and token != eos:
        start = len(prompt) + done - 1  # position of the last committed token, which is not in the cache yet
        step = decode_round(engine, method, token, start)
        tokens = _cut(step.tokens, max_tokens - done, eos)
        yield replace(step, tokens=tokens)
        done += len(tokens)
        token = tokens[-1]


def prefill(engine: Engine, method: Method, prompt: Sequence[int]) -> int:
    """Fill the caches with the prompt, in chunks, and return the first token of the answer."""
    engine.context.length = 0
    tokens = torch.tensor(prompt)
    hidden = torch.empty(0)
    for start in range(0, len(prompt), PREFILL_CHUNK):
        chunk = tokens[start : start + PREFILL_CHUNK]
        rows = chunk.shape[0]
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        mask = model.attention_mask(engine.target, causal, start)
        positions = torch.arange(start, start + rows)
        hidden = _forward(engine, method, chunk, positions, start, mask)
    return model.choose(engine.target, hidden[-1:])[0]


def decode_round(engine: Engine, method: Method, token: int, start: int) -> Round:
    """Run one round behind `token` at position `start`; its tokens are not cut."""
    if method.algorithm == "AR":
        hidden = _forward(engine, method, torch.tensor([token]), torch.tensor([start]), start, None)
        return Round(tuple(model.choose(engine.target, hidden)), 0, 1)
    drafted, tokens = propose_tree(engine, method, token)
    committed, accepted = verify(engine, drafted, tokens, start)
    return Round(committed, accepted, len(tokens), drafted if method.algorithm == "DDTREE" else None)


@torch.inference_mode()
def propose_tree(engine: Engine, method: Method, token: int) -> tuple[Tree, list[int]]:
    """Draft a block behind `token` and shape it: the tree and the token of each node, the root's first."""
    logits = dflash.propose(engine.drafter, engine.context, token, method.block_size)  # [block - 1, draft vocab]
    vocabulary = engine.drafter.vocabulary
    if method.algorithm == "DFLASH":
        return tree.chain(method.block_size - 1), [token, *vocabulary[logits.argmax(-1)].tolist()]
    best, ranked = logits.topk(min(method.effective_cap, logits.shape[-1]), -1)  # [block - 1, cap]
    log_probs = best - logits.logsumexp(-1, keepdim=True)
    drafted = tree.best_first(log_probs.tolist(), method.budget)
    choices = vocabulary[ranked].tolist()
    nodes = zip(drafted.depths[1:], drafted.ranks[1:], strict=True)
    return drafted, [token, *(choices[depth - 1][rank] for depth, rank in nodes)]


@torch.inference_mode()
def verify(engine: Engine, drafted: Tree, tokens: Sequence[int], start: int) -> tuple[tuple[int, ...], int]:
    """Run the target over the tree, keep the path it agrees with: the committed tokens and the accepted drafts."""
    visible = torch.from_numpy(tree.visibility(drafted.parents))  # [nodes, nodes]
    positions = torch.tensor(drafted.depths) + start
    mask = model.attention_mask(engine.target, visible, start)
    hidden, features = model.forward(
        engine.target, engine.cache, torch.tensor(tokens), positions, start, mask, engine.drafter.config.feature_layers
    )
    targets = model.choose(engine.target, hidden)
    path = tree.walk(drafted.parents, tokens, targets)
    _keep(engine.cache, start, path)
    assert features is not None
    dflash.extend(engine.drafter, engine.context, features[path])
    return (*(tokens[node] for node in path[1:]), targets[path[-1]]), len(path) - 1


def _forward(
    engine: Engine, method: Method, tokens: Tensor, positions: Tensor, start: int, mask: Tensor | None
) -> Tensor:
    """A target forward whose rows are all committed: hidden states [T, dim]; the drafter sees them if there is one."""
    layers = () if method.algorithm == "AR" else engine.drafter.config.feature_layers
    hidden, features = model.forward(engine.target, engine.cache, tokens, positions, start, mask, layers)
    if features is not None:
        dflash.extend(engine.drafter, engine.context, features)
    return hidden


def _keep(cache: KVCache, start: int, path: Sequence[int]) -> None:
    """Move the accepted nodes' keys and values to the front of the new slots."""
    if path[-1] == len(path) - 1:  # nodes ascend along a path: the accepted ones are the first already
        return
    slots = torch.tensor(path) + start
    cache.k[:, :, start : start + len(path)] = cache.k[:, :, slots]
    cache.v[:, :, start : start + len(path)] = cache.v[:, :, slots]


def _cut(tokens: tuple[int, ...], room: int, eos: int | None) -> tuple[int, ...]:
    """The tokens up to and with the first EOS, at most `room`."""
    tokens = tokens[:room]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
