from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from ddtree_reference import tree
from ddtree_reference.tree import Tree

VECTOR = [(0.6, 0.3, 0.1), (0.5, 0.3, 0.2), (0.9, 0.06, 0.04)]
CONFIDENT = [(0.9, 0.05, 0.05)] * 3


def logs(marginals: list[tuple[float, ...]]) -> list[list[float]]:
    return [[math.log(p) for p in depth] for depth in marginals]


def paths(built: Tree) -> list[tuple[int, ...]]:
    """The tuple of ranks that leads to each node, root left out."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(built.parents)):
        found.append((*found[built.parents[node]], built.ranks[node]))
    return found[1:]


def brute_force(log_probs: list[list[float]], budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """All prefixes by falling probability, ties by ranks, the first `budget` of them."""
    ranks = range(len(log_probs[0]))
    prefixes = [
        (math.fsum(log_probs[d][r] for d, r in enumerate(path)), path)
        for depth in range(1, len(log_probs) + 1)
        for path in itertools.product(ranks, repeat=depth)
    ]
    return sorted(prefixes, key=lambda item: (-item[0], item[1]))[:budget]


@pytest.mark.parametrize("seed", range(12))
def test_best_first_is_the_brute_force_optimum(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        check_against_brute_force(rng)


def check_against_brute_force(rng: random.Random) -> None:
    depth, cap = rng.randint(1, 4), rng.randint(1, 5)
    weights = [sorted((rng.expovariate(1) for _ in range(cap + 2)), reverse=True) for _ in range(depth)]
    log_probs = [[math.log(w / sum(row)) for w in row[:cap]] for row in weights]
    everything = sum(cap**d for d in range(1, depth + 1))
    for budget in {1, 2, rng.randint(1, 40), everything, everything + 3}:
        built = tree.best_first(log_probs, budget)
        chosen = paths(built)
        expected = brute_force(log_probs, budget)
        assert set(chosen) == {path for _, path in expected}
        assert len(chosen) == len(set(chosen)) == min(budget, everything)
        assert all(parent < node for node, parent in enumerate(built.parents))
        assert all(len(path) == d for path, d in zip(chosen, built.depths[1:], strict=True))


def test_vectors() -> None:
    five = tree.best_first(logs(VECTOR), 5)
    assert set(paths(five)) == {(0,), (0, 0), (1,), (0, 0, 0), (0, 1)}
    eight = tree.best_first(logs(VECTOR), 8)
    assert set(paths(eight)) - set(paths(five)) == {(0, 1, 0), (1, 0), (1, 0, 0)}
    probability = {path: math.prod(VECTOR[d][r] for d, r in enumerate(path)) for path in paths(eight)}
    assert sum(probability[path] for path in paths(five)) == pytest.approx(1.65)
    assert sum(probability.values()) == pytest.approx(2.097)


def test_a_confident_drafter_gives_a_chain_until_the_budget_exceeds_the_depth() -> None:
    three = tree.best_first(logs(CONFIDENT), 3)
    assert paths(three) == [(0,), (0, 0), (0, 0, 0)]
    assert three.parents == tree.chain(3).parents
    assert tree.branching_nodes(three.parents) == 0
    five = tree.best_first(logs(CONFIDENT), 5)
    assert set(paths(five)) == {(0,), (0, 0), (0, 0, 0), (1,), (2,)}
    assert tree.branching_nodes(five.parents) == 1


def test_equal_probabilities_are_ordered_by_ranks() -> None:
    flat = [[-1.0] * 3] * 2
    assert paths(tree.best_first(flat, 6)) == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2)]
    equal = [[0.0, 0.0], [0.0, 0.0]]
    assert paths(tree.best_first(equal, 4)) == [(0,), (0, 0), (0, 1), (1,)]


def test_a_cap_bounds_ranks_and_the_tree_may_run_out() -> None:
    built = tree.best_first([row[:1] for row in logs(VECTOR)], 8)
    assert paths(built) == [(0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize("seed", range(50))
def test_visibility_is_self_and_ancestors(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(1, 40)
    parents = [-1] + [rng.randrange(node) for node in range(1, nodes)]
    visible = tree.visibility(parents)
    for node in range(nodes):
        ancestors, at = set(), node
        while at >= 0:
            ancestors.add(at)
            at = parents[at]
        assert set(np.flatnonzero(visible[node])) == ancestors


def test_visibility_of_a_chain_is_causal() -> None:
    assert np.array_equal(tree.visibility(tree.chain(7).parents), np.tri(8, dtype=bool))


def test_walk_follows_the_target_and_stops_where_no_child_agrees() -> None:
    #        0 -> 1 -> 3 -> 5
    #          -> 2 -> 4
    parents = [-1, 0, 0, 1, 2, 3]
    tokens = [50, 10, 11, 12, 13, 14]

    def walk(targets: list[int]) -> tuple[list[int], int]:
        return tree.walk(parents, tokens, targets.__getitem__)

    assert walk([11, 0, 13, 0, 99, 0]) == ([0, 2, 4], 99)
    assert walk([10, 12, 0, 14, 0, 1]) == ([0, 1, 3, 5], 1)
    assert walk([10, 13, 0, 0, 0, 0]) == ([0, 1], 13)
    assert walk([99, 0, 0, 0, 0, 0]) == ([0], 99)


def test_walk_asks_for_the_choice_of_accepted_nodes_alone() -> None:
    asked = []

    def choose(node: int) -> int:
        asked.append(node)
        return {0: 10, 1: 12}.get(node, 7)

    assert tree.walk([-1, 0, 0, 1, 2], [50, 10, 11, 12, 13], choose) == ([0, 1, 3], 7)
    assert asked == [0, 1, 3]


def test_branching_nodes_count_the_root() -> None:
    assert tree.branching_nodes([-1]) == 0
    assert tree.branching_nodes([-1, 0, 0]) == 1
    assert tree.branching_nodes([-1, 0, 0, 1, 1, 1, 2]) == 2
