"""The best draft tree of every request of a batch, in PyTorch, without a host synchronisation.

A DFlash drafter gives one distribution a depth, independent of the path, so a path's log-probability is a sum, and the
`budget` most probable paths are closed under taking prefixes: they form the tree with the largest expected number of
accepted drafts (DDTree, https://github.com/liranringel/ddtree). Paths are ordered by their score, highest first, and
equal scores by the tuple of ranks. A path comes after its parent and after its previous sibling in that order, so a
best-first search with a heap pops nodes in exactly that order, and every way to find the first `budget` nodes of it
gives the same tree, node by node. Two ways are used here:

* `SortedPaths`, where few paths can be in the tree at all: score all of them and sort.
* `BestFirst`, for the rest: the heap search, one pop of every request a step, with the heap kept as an array.

Scores are float64 sums of float32 values, added from the root down, as a search on Python floats adds them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

MAX_SORTED_PATHS = 1024
"""Above this number of possible paths, sorting them takes longer than the search."""

IMPOSSIBLE = torch.finfo(torch.float64).min
"""The search's score of a path of probability zero: finite, so that it is above that of a node that is not there."""

SATURATED = 2**62


class DraftTree(NamedTuple):
    """Trees of a batch, each [batch, budget], nodes in the order of their scores; the root is not among them.

    A node's number is its place counted from 1, and 0 is the root, so `parents[b, i] <= i`.
    """

    ranks: Tensor
    """int64: the place of the node's token among the candidates of its depth, best first, from 0."""
    depths: Tensor
    """int64: 1 for children of the root."""
    parents: Tensor
    """int64: the number of the parent."""
    scores: Tensor
    """float64: the natural logarithm of the path's probability, minus infinity where it is zero."""


def most_nodes(depth: int, candidates: int) -> int:
    """The nodes of the full tree, root not counted: the sum of candidates**d over d = 1..depth, at most 2**62."""
    nodes = 0
    for _ in range(depth):
        nodes = (nodes + 1) * candidates
        if nodes >= SATURATED:
            return SATURATED
    return nodes


def check_sizes(depth: int, candidates: int, budget: int) -> None:
    """Raise ValueError unless a tree of `budget` nodes exists for `depth` depths of `candidates` candidates each."""
    if min(depth, candidates, budget) < 1:
        raise ValueError(f"depth {depth}, candidates {candidates} and budget {budget} must each be at least 1")
    if budget > most_nodes(depth, candidates):
        raise ValueError(
            f"budget {budget} is more than the {most_nodes(depth, candidates)} nodes of the full tree of depth {depth} "
            f"with {candidates} candidates a depth: lower the budget, or raise the number of candidates"
        )


def check_shape(log_probs: Tensor, depth: int, candidates: int) -> None:
    """Raise ValueError unless `log_probs` is [batch, depth, candidates]."""
    if log_probs.dim() != 3 or log_probs.shape[1:] != (depth, candidates):
        raise ValueError(f"log_probs has shape {list(log_probs.shape)}, not [batch, {depth}, {candidates}]")


def could_be_chosen(depth: int, candidates: int, budget: int, limit: int) -> list[tuple[int, ...]] | None:
    """The paths that are in the best tree for some log-probabilities, in lexicographic order; None if above `limit`.

    Lowering a rank of a path, or cutting its end, gives a path that comes before it. A path with ranks r1, r2, ...
    has (r1 + 1) + (r1 + 1)(r2 + 1) + ... such paths, itself counted, so it is in the tree only if that is at most
    `budget`.
    """
    paths: list[tuple[int, ...]] = []
    pending: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]
    while pending:
        path, width, before = pending.pop()
        if path:
            paths.append(path)
        if len(paths) > limit:
            return None
        if len(path) == depth:
            continue
        most = min(candidates, (budget - before) // width)
        pending += [((*path, rank), width * (rank + 1), before + width * (rank + 1)) for rank in reversed(range(most))]
    return paths


class SortedPaths:
    """Scores all paths that can be in the tree and sorts them.

    They are laid out in lexicographic order, so a stable sort by score breaks ties as it should.
    """

    def __init__(self, paths: list[tuple[int, ...]], budget: int, device: torch.device) -> None:
        self.budget = budget
        place = {path: number for number, path in enumerate(paths)}
        by_depth = sorted(paths, key=len)

        def constant(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.levels: list[tuple[Tensor, Tensor]] = []
        above: dict[tuple[int, ...], int] = {(): 0}
        for depth in range(1, len(by_depth[-1]) + 1):
            level = [path for path in by_depth if len(path) == depth]
            self.levels.append((constant([above[path[:-1]] for path in level]), constant([path[-1] for path in level])))
            above = {path: number for number, path in enumerate(level)}
        number_by_depth = {path: number for number, path in enumerate(by_depth)}
        self.lexicographic = constant([number_by_depth[path] for path in paths])
        self.ranks = constant([path[-1] for path in paths])
        self.depths = constant([len(path) for path in paths])
        self.parents = constant([place.get(path[:-1], len(paths)) for path in paths])
        self.numbers = torch.arange(1, budget + 1, device=device).unsqueeze(0)

    def __call__(self, log_probs: Tensor) -> DraftTree:
        """Build the trees of log-probabilities [batch, depth, candidates], float64 and at most 0."""
        batch = log_probs.shape[0]
        by_depth = log_probs.permute(1, 2, 0).contiguous()
        score = by_depth.new_zeros(1, batch)
        levels = []
        for depth, (parents, ranks) in enumerate(self.levels):
            score = score.index_select(0, parents) + by_depth[depth].index_select(0, ranks)
            levels.append(score)
        scores = torch.cat(levels).index_select(0, self.lexicographic).t().contiguous()
        ordered, order = scores.sort(dim=1, descending=True, stable=True)
        chosen = order[:, : self.budget]
        # Paths that are not chosen keep number 0; only the root, behind the last path, is looked up among them.
        number = chosen.new_zeros(batch, scores.shape[1] + 1)
        number.scatter_(1, chosen, self.numbers.expand(batch, -1))
        parents = number.gather(1, self.parents[chosen])
        return DraftTree(self.ranks[chosen], self.depths[chosen], parents, ordered[:, : self.budget])


class BestFirst:
    """Pops the best node of every request `budget` times; a popped node gives way to its first child and its sibling.

    The frontier is an array in lexicographic order: nothing in it lies between a node, its first child and its next
    sibling, so these two take the node's place, and the first of equal scores is the one that comes first. Each entry
    has four float64 rows: its score, its parent's score, its parent's number and its column, which is its depth - 1
    times `candidates` plus its rank. Children and siblings that do not exist are entries with score minus infinity.
    """

    def __init__(self, depth: int, candidates: int, budget: int, device: torch.device) -> None:
        self.candidates, self.budget = candidates, budget
        absent = depth * candidates
        child = [(c // candidates + 1) * candidates for c in range(absent)]
        sibling = [c + 1 if (c + 1) % candidates else absent for c in range(absent)]
        columns = torch.tensor([*zip(child, sibling, strict=True), (absent, absent)], device=device)
        # Where a popped column's successors are among the log-probabilities, and where their lowest scores are.
        self.successors = torch.cat((columns, columns + absent + 1), dim=1)
        self.floors = torch.full((1, absent + 2), IMPOSSIBLE, dtype=torch.float64, device=device)
        self.floors[0, 0] = self.floors[0, -1] = -torch.inf
        self.numbers = [torch.full((1, 1), i, dtype=torch.float64, device=device) for i in range(1, budget)]
        self.moves = [self._moves(width, device) for width in range(1, budget)]

    @staticmethod
    def _moves(width: int, device: torch.device) -> Tensor:
        """Row p: for each of the next frontier's entries, which entry of (the frontier, child, sibling) it is."""
        popped = torch.arange(width, device=device).unsqueeze(1)
        entry = torch.arange(width + 1, device=device).unsqueeze(0)
        kept = torch.where(entry < popped, entry, entry - 1)
        is_new = (entry == popped) | (entry == popped + 1)
        return torch.where(is_new, width + entry - popped, kept)

    def __call__(self, log_probs: Tensor) -> DraftTree:
        """Build the trees of log-probabilities [batch, depth, candidates], float64 and at most 0."""
        batch = log_probs.shape[0]
        flat = log_probs.flatten(1).clamp(min=IMPOSSIBLE)
        steps = torch.cat((flat, self.floors.expand(batch, -1)), dim=1)
        frontier = flat.new_zeros(batch, 4, 1)
        frontier[:, 0] = flat[:, :1]
        popped = []
        for width in range(1, self.budget + 1):
            # max gives the first of equal values, as its documentation promises.
            best = frontier[:, 0].max(dim=1).indices
            node = frontier.gather(2, best.view(batch, 1, 1).expand(batch, 4, 1))
            popped.append(node)
            if width < self.budget:
                successors = self._successors(node.squeeze(2), steps, self.numbers[width - 1])
                move = embedding(best, self.moves[width - 1]).unsqueeze(1).expand(batch, 4, width + 1)
                frontier = torch.cat((frontier, successors), dim=2).gather(2, move)
        score, _, parent, column = torch.cat(popped, dim=2).unbind(1)
        places = column.long()
        depths = places.div(self.candidates, rounding_mode="floor") + 1
        scores = score.masked_fill(score == IMPOSSIBLE, -torch.inf)
        return DraftTree(places.remainder(self.candidates), depths, parent.long(), scores)

    def _successors(self, node: Tensor, steps: Tensor, number: Tensor) -> Tensor:
        """The first child and next sibling, [batch, 4, 2], of popped nodes [batch, 4] that got this number."""
        columns = embedding(node[:, 3].long(), self.successors)
        step = steps.gather(1, columns)
        above = node[:, :2]
        scores = torch.maximum(above + step[:, :2], step[:, 2:])
        parents = (number.expand(node.shape[0], 1), node[:, 2:3])
        return torch.cat((scores, above, *parents, columns[:, :2]), dim=1).view(-1, 4, 2)


class TreeBuilder:
    """Builds best trees of one shape; all constants are made here, so a call only launches device work.

    A call has the same shapes and the same operations whatever the log-probabilities, so it can be captured in a
    CUDA graph. Raises ValueError if the full tree has fewer than `budget` nodes or a size is below 1.
    """

    def __init__(self, depth: int, candidates: int, budget: int, device: torch.device | str) -> None:
        check_sizes(depth, candidates, budget)
        self.depth, self.candidates = depth, candidates
        paths = could_be_chosen(depth, candidates, budget, MAX_SORTED_PATHS)
        self.method: SortedPaths | BestFirst
        if paths is None:
            self.method = BestFirst(depth, candidates, budget, torch.device(device))
        else:
            self.method = SortedPaths(paths, budget, torch.device(device))

    def __call__(self, log_probs: Tensor) -> DraftTree:
        """The best trees of `log_probs`, [batch, depth, candidates], each row sorted, highest first.

        Values above 0, which rounding can make, count as 0, so that no child scores above its parent; NaN counts as
        probability zero. Raises ValueError if the shape is another one.
        """
        check_shape(log_probs, self.depth, self.candidates)
        scores = log_probs.double().nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp(max=0.0)
        return self.method(scores)


@lru_cache(maxsize=64)
def cached_builder(depth: int, candidates: int, budget: int, device: torch.device) -> TreeBuilder:
    """The builder of this shape, made once."""
    return TreeBuilder(depth, candidates, budget, device)


def build_tree(log_probs: Tensor, budget: int) -> DraftTree:
    """The `budget` most probable paths of each request, [batch, depth, candidates] log-probabilities, rows descending.

    Raises ValueError if the full tree has fewer than `budget` nodes. The first call for a shape makes its constants;
    capture a CUDA graph only after it.
    """
    if log_probs.dim() != 3:
        raise ValueError(f"log_probs has shape {list(log_probs.shape)}, not [batch, depth, candidates]")
    _, depth, candidates = log_probs.shape
    return cached_builder(depth, candidates, budget, log_probs.device)(log_probs)


def branching_nodes(tree: DraftTree) -> Tensor:
    """The number of nodes with two or more children, root included, [batch] int64; 0 means that the tree is a chain."""
    batch, budget = tree.parents.shape
    children = tree.parents.new_zeros(batch, budget + 1)
    children.scatter_add_(1, tree.parents, torch.ones_like(tree.parents))
    return (children >= 2).sum(dim=1)
