"""The draft tree of DDTree: the `budget` most probable prefixes of the drafter's per-depth distributions.

The drafter gives one distribution a depth, independent of the path, so a path's probability is a product, the
expected number of accepted drafts of a tree is the sum of its nodes' path probabilities, and the most probable
prefixes are closed under taking prefixes: they form the best tree (DDTree, https://github.com/liranringel/ddtree).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tree:
    """Nodes in the order they were chosen; node 0 is the root (parent -1, depth 0), parents precede children.

    `ranks[i]` is node i's place among the tokens of its depth, best first (the root's is 0 and means nothing).
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]


def best_first(log_probs: Sequence[Sequence[float]], budget: int) -> Tree:
    """Build the best tree of `budget` nodes (root not counted) with a max-heap, O(budget log budget).

    `log_probs[d][r]` is the log-probability of the token of rank r at depth d + 1, [depths][topk_cap], descending.
    Equal path probabilities are ordered by the tuple of ranks. The tree is smaller than `budget` if no more
    paths exist. With topk_cap < budget it is the best tree among those whose ranks are below the cap.
    """
    parents, depths, ranks = [-1], [0], [0]
    depth_limit, rank_limit = len(log_probs), len(log_probs[0])
    # entry: -score, ranks of the path, parent node, score of the parent
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-log_probs[0][0], (0,), 0, 0.0)]
    while heap and len(parents) <= budget:
        negative, path, parent, parent_score = heapq.heappop(heap)
        depth, rank, node = len(path), path[-1], len(parents)
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        if rank + 1 < rank_limit:
            sibling = parent_score + log_probs[depth - 1][rank + 1]
            heapq.heappush(heap, (-sibling, (*path[:-1], rank + 1), parent, parent_score))
        if depth < depth_limit:
            child = -negative + log_probs[depth][0]
            heapq.heappush(heap, (-child, (*path, 0), node, -negative))
    return Tree(tuple(parents), tuple(depths), tuple(ranks))


def chain(depth: int) -> Tree:
    """The tree of DFlash's linear verification: the best token of each depth, one below the other."""
    return Tree(tuple(range(-1, depth)), tuple(range(depth + 1)), (0,) * (depth + 1))


def visibility(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which nodes each node attends to, [nodes, nodes]: itself and its ancestors (a parent's row, and itself)."""
    visible = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        visible[node] |= visible[parents[node]]
    return visible


def walk(parents: Sequence[int], tokens: Sequence[int], choose: Callable[[int], int]) -> tuple[list[int], int]:
    """Follow the target's choices down the tree: the accepted nodes, root first, and the token behind the last one.

    `tokens[i]` is node i's token and `choose(i)` the token that the target takes after it, its best one or one drawn
    from its distribution; the walk goes to the child that is that token and ends where there is none. So every token
    is the target's own choice given those before it, and drafts decide only how many of them a round finds.
    """
    children = {(parents[node], tokens[node]): node for node in range(1, len(parents))}
    path = [0]
    token = choose(0)
    while (child := children.get((path[-1], token))) is not None:
        path.append(child)
        token = choose(child)
    return path, token


def branching_nodes(parents: Sequence[int]) -> int:
    """The number of nodes with two or more children, root included; 0 means that the tree is a chain."""
    counts = np.bincount(np.asarray(parents[1:], dtype=np.int64), minlength=1)
    return int((counts >= 2).sum())
