"""How many tokens a round would commit, estimated along held-out greedy answers without decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree_reference import tree
from ddtree_training import batches, targets
from ddtree_training.dataset import Recorded
from ddtree_training.network import Network

BUDGETS = (8, 16)
ANCHORS = 24  # evenly spread in an answer
ANSWERS_PER_PASS = 8


@torch.inference_mode()
def accept_lengths(
    network: Network, answers: Sequence[Recorded], embedding: Tensor, head: Tensor, index: Tensor, block: int
) -> dict[str, float]:
    """Mean tokens a round commits, bonus included, at evenly spread anchors: of the chain and of trees.

    The target's choices are the answer's tokens, so a tree's accepted path is the longest prefix of them that is in
    it. Anchors near the answer's end count with the fewer tokens that are left. `head` is cut to the draft vocabulary,
    `index` places the target's tokens in it.
    """
    totals: dict[str, float] = {"DFLASH": 0.0} | {f"DDTREE:{budget}": 0.0 for budget in BUDGETS}
    ordered = sorted(answers, key=lambda answer: answer.length)
    count = 0
    for start in range(0, len(ordered), ANSWERS_PER_PASS):
        part = ordered[start : start + ANSWERS_PER_PASS]
        blocks = batches.lay_out(part, [_spread(answer) for answer in part], block)
        hidden = network(blocks.features, blocks.anchors, embedding[blocks.anchor_tokens], block)
        wanted = torch.full((hidden.shape[0] * hidden.shape[1] * (block - 1),), -1)
        wanted[blocks.rows] = targets.greedy(blocks, part, index)
        for logits, tokens in zip(
            (F.linear(rows, head).float() for rows in hidden.flatten(0, 1)), wanted.view(-1, block - 1), strict=True
        ):
            count += 1
            for name, accepted in _accepted(logits, tokens).items():
                totals[name] += 1 + accepted
    return {name: total / count for name, total in totals.items()}


def _spread(answer: Recorded) -> list[int]:
    places = torch.linspace(answer.prompt_length, answer.length - 2, ANCHORS)
    return [int(place) for place in places.round()]


def _accepted(logits: Tensor, wanted: Tensor) -> dict[str, int]:
    """Drafts accepted of one block's logits [block - 1, draft vocab], where the target says `wanted` [block - 1]."""
    best, ranked = logits.topk(min(max(BUDGETS), logits.shape[-1]), -1)
    log_probs = (best - logits.logsumexp(-1, keepdim=True)).tolist()
    found = ranked == wanted[:, None]
    ranks = [int(row.nonzero()[0, 0]) if bool(row.any()) else -1 for row in found]
    built = tree.best_first(log_probs, max(BUDGETS))
    accepted = {"DFLASH": _prefix([rank == 0 for rank in ranks])}
    for budget in BUDGETS:  # nodes come in the order they are chosen: the smaller tree is the beginning of the larger
        accepted[f"DDTREE:{budget}"] = _walk(built, ranks, budget)
    return accepted


def _prefix(matches: Sequence[bool]) -> int:
    return next((depth for depth, match in enumerate(matches) if not match), len(matches))


def _walk(built: tree.Tree, ranks: Sequence[int], budget: int) -> int:
    """Depth reached in the first `budget` nodes of a tree by taking the child of the given rank at each depth."""
    children = {
        (built.parents[node], built.ranks[node]): node for node in range(1, min(budget + 1, len(built.parents)))
    }
    node = depth = 0
    while depth < len(ranks) and (child := children.get((node, ranks[depth]))) is not None:
        node, depth = child, depth + 1
    return depth
