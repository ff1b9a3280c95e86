"""Best trees in PyTorch against brute force, and node by node against the embedded engine's heap."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ddtree_reference.tree import Tree, best_first
from ddtree_reference.tree import branching_nodes as branching_nodes_of_one
from sglang_ddtree import tree as tree_module
from sglang_ddtree.tree import (
    BestFirst,
    DraftTree,
    SortedPaths,
    TreeBuilder,
    branching_nodes,
    build_tree,
    could_be_chosen,
    most_nodes,
)

DEPTHS = (1, 2, 3, 7, 9, 15)
CAPS = (1, 2, 4, 8, 16)
BUDGETS = (1, 2, 3, 4, 7, 8, 15, 16, 32, 64)
CPU = torch.device("cpu")


def drafts(depth: int, candidates: int, seed: int = 0) -> torch.Tensor:
    """Log-probabilities of nine requests that differ: flat to peaked, tied, uniform, and with impossible tokens."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.3, 1.0, 2.0, 4.0, 9.0, 1.0, 1.0, 2.0, 1.0]).view(-1, 1, 1)
    logits = torch.randn(len(scale), depth, 40, generator=generator) * scale
    log_probs = torch.log_softmax(logits, -1).topk(candidates).values
    log_probs[5] = (log_probs[5] * 2).round() / 2
    log_probs[6] = -1.0
    log_probs[7, :, (candidates + 1) // 2 :] = -torch.inf
    log_probs[8, depth // 2] = -torch.inf
    return log_probs


def heap_tree(log_probs: torch.Tensor, budget: int) -> Tree:
    return best_first(log_probs.tolist(), budget)


def one(trees: DraftTree, request: int) -> Tree:
    """One request's tree in the embedded engine's form."""
    parents, depths, ranks = (x[request].tolist() for x in (trees.parents, trees.depths, trees.ranks))
    return Tree((-1, *parents), (0, *depths), (0, *ranks))


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The path of each node, root left out."""
    found: list[tuple[int, ...]] = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        found.append((*found[parent], rank))
    return found[1:]


def path_score(log_probs: list[list[float]], path: tuple[int, ...]) -> float:
    score = 0.0
    for depth, rank in enumerate(path):
        score += log_probs[depth][rank]
    return score


def all_paths(log_probs: list[list[float]]) -> list[tuple[int, ...]]:
    """Every path, in the order in which a tree takes them."""
    depth, candidates = len(log_probs), len(log_probs[0])
    every = [path for d in range(1, depth + 1) for path in product(range(candidates), repeat=d)]
    return sorted(every, key=lambda path: (-path_score(log_probs, path), path))


def search(log_probs: torch.Tensor, budget: int) -> DraftTree:
    """The trees by the search, also where sorting paths would be chosen."""
    return BestFirst(log_probs.shape[1], log_probs.shape[2], budget, CPU)(log_probs.double())


@pytest.mark.parametrize(("depth", "candidates"), [(1, 1), (1, 6), (2, 5), (3, 3), (4, 2), (5, 1)])
@pytest.mark.parametrize("build", [build_tree, search])
def test_equals_brute_force(build, depth, candidates):
    log_probs = drafts(depth, candidates)
    budget = most_nodes(depth, candidates)
    trees = build(log_probs, budget)
    for request, rows in enumerate(log_probs.tolist()):
        expected = all_paths(rows)
        assert paths(one(trees, request)) == expected
        assert trees.scores[request].tolist() == [path_score(rows, path) for path in expected]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("candidates", CAPS)
@pytest.mark.parametrize("build", [build_tree, search])
def test_equals_the_heap_node_by_node(build, depth, candidates):
    log_probs = drafts(depth, candidates, seed=depth * 100 + candidates)
    for budget in BUDGETS:
        if budget > most_nodes(depth, candidates):
            continue
        trees = build(log_probs, budget)
        for request in range(len(log_probs)):
            assert one(trees, request) == heap_tree(log_probs[request], budget), (budget, request)


@pytest.mark.parametrize("build", [build_tree, search])
def test_equals_the_heap_where_float64_sums_round(build):
    # 1e-20 is lost beside 1, so parents with different scores have children with equal ones.
    first = torch.tensor([-1e-20, -2e-20, -3e-20, -1.0])
    second = torch.tensor([-1.0, -1.0, -3e38, -3e38])
    third = torch.tensor([-1e-30, -1e-7, -1e7, -torch.inf])
    for rows in ([first, second, third], [third, first, second], [second, third, first]):
        log_probs = torch.stack(rows).unsqueeze(0)
        for budget in (1, 3, 8, 13, 16, 40, 84):
            assert one(build(log_probs, budget), 0) == heap_tree(log_probs[0], budget), budget


def test_sums_in_float32_make_another_tree():
    # In float32 -6e-7 - 8 is -8 - 2**-20: (1, 0) would tie with (0, 1), and come after it.
    log_probs = torch.tensor([[[0.0, -6e-7], [-8.0, -8.0 - 2**-20]]])
    expected = [(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1)]
    assert paths(one(build_tree(log_probs, 6), 0)) == paths(one(search(log_probs, 6), 0)) == expected

    class SearchInFloat32(BestFirst):
        def _successors(self, node, steps, number):
            entries = super()._successors(node, steps, number)
            entries[:, 0] = entries[:, 0].float().double()
            return entries

    every = could_be_chosen(2, 2, 6, 100)
    assert every is not None
    rounded = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert paths(one(SortedPaths(every, 6, CPU)(log_probs), 0)) == rounded
    assert paths(one(SearchInFloat32(2, 2, 6, CPU)(log_probs.double()), 0)) == rounded


def test_ties_to_the_shallower_node_is_another_tree():
    log_probs = torch.tensor([[[-1.0, -1.0], [0.0, -1.0]]])
    every = all_paths(log_probs[0].tolist())
    shallow = sorted(every, key=lambda path: (-path_score(log_probs[0].tolist(), path), len(path), path))
    assert paths(one(build_tree(log_probs, 2), 0)) == every[:2] == [(0,), (0, 0)]
    assert paths(one(search(log_probs, 2), 0)) == every[:2]
    assert shallow[:2] == [(0,), (1,)]


@pytest.mark.parametrize("build", [build_tree, search])
def test_a_tree_is_the_beginning_of_the_tree_with_one_node_more(build):
    log_probs = drafts(7, 4)
    for smaller, larger in pairwise(build(log_probs, budget) for budget in range(1, 34)):
        for few, more in zip(smaller, larger, strict=True):
            assert torch.equal(few, more[:, :-1])


def test_parents_come_first_and_scores_never_rise():
    for trees in (build_tree(drafts(15, 16), 64), build_tree(drafts(7, 8), 16)):
        numbers = torch.arange(1, trees.parents.shape[1] + 1)
        assert (trees.parents < numbers).all()
        depths = torch.cat((torch.zeros(len(trees.depths), 1, dtype=torch.int64), trees.depths), dim=1)
        assert torch.equal(depths.gather(1, trees.parents) + 1, trees.depths)
        assert (trees.scores[:, 1:] <= trees.scores[:, :-1]).all()
        assert trees.scores.dtype == torch.float64


def test_a_request_does_not_depend_on_its_batch():
    log_probs = drafts(9, 8)
    for budget in (15, 64):
        together = build_tree(log_probs, budget)
        for request in range(len(log_probs)):
            alone = build_tree(log_probs[request : request + 1], budget)
            for one_field, all_fields in zip(alone, together, strict=True):
                assert torch.equal(one_field[0], all_fields[request])


@pytest.mark.parametrize("build", [build_tree, lambda x, budget: TreeBuilder(*x.shape[1:], budget, "cpu")(x)])
def test_rounding_above_zero_and_nan_keep_the_tree_whole(build):
    log_probs = torch.tensor([[[1e-7, -20.0], [2e-7, -19.0], [1e-7, -18.0]], [[torch.nan, -1.0]] * 3])
    trees = build(log_probs, 5)
    assert paths(one(trees, 0))[:3] == [(0,), (0, 0), (0, 0, 0)]
    for request in range(2):
        nodes = paths(one(trees, request))
        assert len(set(nodes)) == 5
        assert max(map(max, nodes)) < 2
        assert max(map(len, nodes)) <= 3


def test_an_empty_batch_has_no_trees():
    for depth, budget in ((3, 4), (15, 64)):
        assert [list(x.shape) for x in build_tree(torch.zeros(0, depth, 8), budget)] == [[0, budget]] * 4


def test_both_methods_are_in_use():
    assert isinstance(TreeBuilder(7, 8, 16, "cpu").method, SortedPaths)
    assert isinstance(TreeBuilder(15, 16, 64, "cpu").method, BestFirst)


@pytest.mark.parametrize(("depth", "candidates", "budget"), [(7, 8, 16), (15, 16, 64)])
def test_no_value_is_read_on_the_host(depth, candidates, budget):
    # A fake tensor has no values: reading one, or a shape that depends on one, raises.
    with FakeTensorMode():
        builder = TreeBuilder(depth, candidates, budget, "cpu")
        trees = builder(torch.empty(3, depth, candidates))
        assert trees.parents.shape == (3, budget)
        assert branching_nodes(trees).shape == (3,)


def test_constants_are_made_once_a_shape(monkeypatch):
    made = []

    class Counted(TreeBuilder):
        def __init__(self, *sizes):
            made.append(sizes)
            super().__init__(*sizes)

    monkeypatch.setattr(tree_module, "TreeBuilder", Counted)
    tree_module.cached_builder.cache_clear()
    for budget in (5, 5, 6, 5):
        build_tree(drafts(3, 4), budget)
    tree_module.cached_builder.cache_clear()
    assert [sizes[2] for sizes in made] == [5, 6]


def no_worse(path: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether `path` comes before `other`, or is it, whatever the log-probabilities."""
    return len(path) <= len(other) and all(a <= b for a, b in zip(path, other, strict=False))


def test_paths_that_could_be_chosen_hold_every_tree_and_no_more():
    for depth, candidates, budget in ((3, 4, 9), (2, 6, 12), (5, 2, 10)):
        found = could_be_chosen(depth, candidates, budget, 10_000)
        every = [path for d in range(1, depth + 1) for path in product(range(candidates), repeat=d)]
        assert found == sorted(path for path in every if sum(no_worse(other, path) for other in every) <= budget)
        assert could_be_chosen(depth, candidates, budget, len(found)) == found
        assert could_be_chosen(depth, candidates, budget, len(found) - 1) is None


@pytest.mark.parametrize(("depth", "candidates", "nodes"), [(1, 1, 1), (15, 1, 15), (3, 2, 14), (2, 16, 272)])
def test_most_nodes_counts_the_full_tree(depth, candidates, nodes):
    assert most_nodes(depth, candidates) == nodes
    assert build_tree(torch.zeros(1, depth, candidates), min(nodes, 100)).ranks.shape == (1, min(nodes, 100))
    with pytest.raises(ValueError, match=f"budget {nodes + 1} is more than the {nodes} nodes"):
        build_tree(torch.zeros(1, depth, candidates), nodes + 1)


def test_most_nodes_saturates():
    assert most_nodes(10**6, 16) == most_nodes(31, 1000) == 2**62
    assert most_nodes(61, 2) == 2**62 - 2


@pytest.mark.parametrize("sizes", [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="must each be at least 1"):
        TreeBuilder(*sizes, "cpu")


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \[2, 7, 4\], not \[batch, 7, 8\]"):
        TreeBuilder(7, 8, 16, "cpu")(torch.zeros(2, 7, 4))
    with pytest.raises(ValueError, match=r"shape \[7, 8\]"):
        build_tree(torch.zeros(7, 8), 16)


def test_branching_nodes_equals_the_embedded_engine():
    counts = []
    for depth, candidates, budget in ((15, 1, 15), (7, 8, 16), (15, 16, 64), (2, 8, 64)):
        log_probs = drafts(depth, candidates)
        found = branching_nodes(build_tree(log_probs, budget)).tolist()
        assert found == [branching_nodes_of_one(heap_tree(rows, budget).parents) for rows in log_probs]
        counts += found
    assert min(counts) == 0
    assert len(set(counts)) > 3
