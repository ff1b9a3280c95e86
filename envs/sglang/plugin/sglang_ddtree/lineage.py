"""A draft tree in the arrays that SGLang's EAGLE kernels read."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_ddtree.tree import DraftTree


class Lineage(NamedTuple):
    """EAGLE's encoding of a tree.

    `edges` [batch, budget]: node i hangs at row `edges[i] // topk`; row 0 is the root, row r > 0 the node whose own
    edge is `parents[r]`. `parents` [batch, topk * (depth - 1) + 1], -1 where no node is.
    """

    parents: Tensor
    edges: Tensor
    topk: int


def eagle_topk(candidates: int, budget: int, depth: int) -> int:
    """The branching factor of the encoding, which says nothing about the tree itself.

    The kernels give `parents` topk * (depth - 1) + 1 entries, and every node may be a parent, so it must be at least
    budget / (depth - 1); and 2, for at 1 SGLang takes the tree for a chain and does not move the accepted path.
    """
    return max(candidates, 2, math.ceil(budget / (depth - 1)) if depth > 1 else 2)


def encode(tree: DraftTree, candidates: int, depth: int) -> Lineage:
    """Encode a batch of trees whose ranks are below `candidates` and whose nodes lie at most `depth` deep."""
    budget = tree.parents.shape[1]
    topk = eagle_topk(candidates, budget, depth)
    edges = tree.parents * topk + tree.ranks
    nodes = edges[:, : topk * (depth - 1)]
    parents = torch.nn.functional.pad(nodes, (1, topk * (depth - 1) - nodes.shape[1]), value=-1)
    return Lineage(parents, edges, topk)
