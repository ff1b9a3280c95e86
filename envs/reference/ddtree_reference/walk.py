"""From the target's logits to tokens: which nodes of each draft tree are accepted, and what comes behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_reference import model, sampling, tree
from ddtree_reference.model import Target
from ddtree_reference.sequence import Running
from ddtree_reference.tree import Tree


@dataclass(frozen=True)
class Draft:
    """What one sequence verifies in a round: a tree and each node's token, the root's (already committed) first."""

    tree: Tree
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the target (temperature 1, nothing cut), and the best ones, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Path:
    """The accepted nodes of a tree, root first, the token behind the last one, and the log-probabilities asked for."""

    nodes: list[int]
    token: int
    logprobs: tuple[TokenLogprob, ...]


def walk_all(target: Target, hidden: Tensor, sequences: Sequence[Running], drafts: Sequence[Draft]) -> list[Path]:
    """Follow the target's choices down every tree; `hidden` [rows of all trees, dim] comes before the final norm."""
    scores, normed = model.logits(target, hidden)
    firsts = [0]
    for draft in drafts:
        firsts.append(firsts[-1] + len(draft.tokens))
    greedy = [
        row
        for n, sequence in enumerate(sequences)
        if sequence.request.sampling.greedy
        for row in range(firsts[n], firsts[n + 1])
    ]
    if len(greedy) < len(scores):
        picked = model.pick(target, scores[greedy], normed[greedy])
    else:
        picked = model.pick(target, scores, normed)
    best = dict(zip(greedy, picked, strict=True))
    return [
        _walk(sequence, draft, scores, first, best)
        for sequence, draft, first in zip(sequences, drafts, firsts, strict=False)
    ]


def _walk(sequence: Running, draft: Draft, scores: Tensor, first: int, best: dict[int, int]) -> Path:
    """Walk one tree whose rows begin at `first`; `best` holds the greedy token of each row that is decoded greedily."""
    request = sequence.request

    def drawn(node: int) -> int:
        place = min(sequence.answered + draft.tree.depths[node], request.max_tokens - 1)
        return sampling.draw(scores[first + node], request.sampling, float(sequence.uniforms[place]))

    choose: Callable[[int], int] = (lambda node: best[first + node]) if request.sampling.greedy else drawn
    nodes, token = tree.walk(draft.tree.parents, draft.tokens, choose)
    if request.top_logprobs is None:
        return Path(nodes, token, ())
    tokens = [*(draft.tokens[node] for node in nodes[1:]), token]
    rows = [_logprob(scores[first + node], t, request.top_logprobs) for node, t in zip(nodes, tokens, strict=True)]
    return Path(nodes, token, tuple(rows))


def _logprob(scores: Tensor, token: int, top: int) -> TokenLogprob:
    """What a client hears about one token, from logits [vocab]."""
    log_probs = torch.log_softmax(scores.float(), -1)
    best = log_probs.topk(top)
    return TokenLogprob(
        token, float(log_probs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )
