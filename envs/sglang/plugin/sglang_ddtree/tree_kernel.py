"""The best draft tree of every request of a batch as one Triton kernel, one program a request.

It is the best-first search of DDTree (https://github.com/liranringel/ddtree) with the frontier in registers, and gives
the same nodes in the same order as `tree.build_tree`, which is its oracle. So far it was run under Triton's interpreter
and compiled for NVIDIA's compute capabilities 8.0, 9.0 and 10.0, but not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ddtree.tree import IMPOSSIBLE, DraftTree, TreeBuilder, check_shape, check_sizes

LOWEST = tl.constexpr(IMPOSSIBLE)
"""The search's score of a path of probability zero."""


@triton.jit
def _score_below(above, log_probs, column, exists):
    """Score of the node of this column below a parent with score `above`; minus infinity if it does not exist."""
    step = tl.load(log_probs + column, mask=exists, other=0.0).to(tl.float64)
    # As in the torch builder, NaN counts as probability zero, and what rounding puts above 0 counts as 0.
    step = tl.where(step == step, tl.minimum(step, 0.0), LOWEST)
    score = tl.maximum(above + step, LOWEST)
    return tl.where(exists, score, float("-inf"))


@triton.jit
def _best_first(
    log_probs,
    ranks,
    depths,
    parents,
    scores,
    request_stride,
    DEPTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BUDGET: tl.constexpr,
    FRONTIER: tl.constexpr,
):
    """Pop BUDGET nodes; a popped node's slot goes to its next sibling, and its first child gets a new slot.

    `order` is a slot's place in lexicographic order. A first child takes the place of its parent and the next sibling
    comes right behind it, so the places behind move up by one, and the lowest place breaks a tie.
    """
    request = tl.program_id(0).to(tl.int64)
    log_probs += request * request_stride
    out = request * BUDGET

    slot = tl.arange(0, FRONTIER)
    order = slot
    column = tl.zeros([FRONTIER], tl.int32)
    parent = tl.zeros([FRONTIER], tl.int32)
    above = tl.zeros([FRONTIER], tl.float64)
    score = _score_below(above, log_probs, column, slot == 0)

    for popped in range(BUDGET):
        best = tl.max(score, axis=0)
        place = tl.min(tl.where(score == best, order, 2 * FRONTIER), axis=0)
        is_best = order == place
        node_column = tl.sum(tl.where(is_best, column, 0), axis=0)
        node_parent = tl.sum(tl.where(is_best, parent, 0), axis=0)
        node_above = tl.sum(tl.where(is_best, above, 0.0), axis=0)
        level = node_column // CANDIDATES
        rank = node_column - level * CANDIDATES

        tl.store(ranks + out + popped, rank.to(tl.int64))
        tl.store(depths + out + popped, (level + 1).to(tl.int64))
        tl.store(parents + out + popped, node_parent.to(tl.int64))
        tl.store(scores + out + popped, tl.where(best == LOWEST, float("-inf"), best))

        child = (level + 1) * CANDIDATES
        child_score = _score_below(best, log_probs, child, level + 1 < DEPTH)
        sibling_score = _score_below(node_above, log_probs, node_column + 1, rank + 1 < CANDIDATES)

        is_new = slot == popped + 1
        order = tl.where(order > place, order + 1, order)
        order = tl.where(is_best, place + 1, order)
        order = tl.where(is_new, place, order)
        score = tl.where(is_best, sibling_score, tl.where(is_new, child_score, score))
        above = tl.where(is_new, best, above)
        parent = tl.where(is_new, popped + 1, parent)
        column = tl.where(is_best, node_column + 1, tl.where(is_new, child, column))


class KernelTreeBuilder:
    """Builds best trees of one shape with the kernel; the counterpart of `tree.TreeBuilder`, and raises as it does."""

    def __init__(self, depth: int, candidates: int, budget: int) -> None:
        check_sizes(depth, candidates, budget)
        self.depth, self.candidates, self.budget = depth, candidates, budget
        self.frontier = max(2, triton.next_power_of_2(budget))

    def __call__(self, log_probs: Tensor) -> DraftTree:
        """The best trees of `log_probs`, [batch, depth, candidates], each row sorted, highest first."""
        check_shape(log_probs, self.depth, self.candidates)
        log_probs = log_probs.contiguous()
        shape = (log_probs.shape[0], self.budget)
        ranks, depths, parents = (torch.empty(shape, dtype=torch.int64, device=log_probs.device) for _ in range(3))
        scores = torch.empty(shape, dtype=torch.float64, device=log_probs.device)
        if shape[0]:
            _best_first[(shape[0],)](
                log_probs,
                ranks,
                depths,
                parents,
                scores,
                self.depth * self.candidates,
                DEPTH=self.depth,
                CANDIDATES=self.candidates,
                BUDGET=self.budget,
                FRONTIER=self.frontier,
                num_warps=max(1, min(8, self.frontier // 64)),
            )
        return DraftTree(ranks, depths, parents, scores)


def build_tree_triton(log_probs: Tensor, budget: int) -> DraftTree:
    """The same as `tree.build_tree`, by the kernel."""
    if log_probs.dim() != 3:
        raise ValueError(f"log_probs has shape {list(log_probs.shape)}, not [batch, depth, candidates]")
    _, depth, candidates = log_probs.shape
    return KernelTreeBuilder(depth, candidates, budget)(log_probs)


def tree_builder(depth: int, candidates: int, budget: int, device: torch.device | str) -> Callable[[Tensor], DraftTree]:
    """The builder for this device: the kernel on CUDA, PyTorch's operations elsewhere."""
    if torch.device(device).type == "cuda":
        return KernelTreeBuilder(depth, candidates, budget)
    return TreeBuilder(depth, candidates, budget, device)
