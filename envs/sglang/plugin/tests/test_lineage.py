import pytest
import torch
from torch import tensor

from sglang_ddtree.lineage import eagle_topk, encode
from sglang_ddtree.tree import build_tree, most_nodes


def decoded(lineage, row):
    """The parents of a tree as SGLang's kernels find them: through edges, by value."""
    edges = lineage.edges[row].tolist()
    parents = []
    for edge in edges:
        place = edge // lineage.topk
        parents.append(0 if place == 0 else edges.index(int(lineage.parents[row, place])) + 1)
    return parents


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("candidates", [1, 2, 4, 16])
@pytest.mark.parametrize("budget", [1, 2, 4, 8, 16, 33])
def test_kernels_find_every_parent_again(depth, candidates, budget):
    if budget > most_nodes(depth, candidates):
        pytest.skip("no such tree")
    scores = torch.randn(3, depth, 40, generator=torch.Generator().manual_seed(depth * 100 + budget)) * 3
    log_probs = scores.log_softmax(-1).topk(candidates).values
    deepest = min(depth, budget)
    tree = build_tree(log_probs[:, :deepest], budget)
    lineage = encode(tree, candidates, deepest)
    assert lineage.parents.shape == (3, lineage.topk * (deepest - 1) + 1)  # the stride that the kernels assume
    for row in range(3):
        assert decoded(lineage, row) == tree.parents[row].tolist()


def test_every_node_can_be_a_parent_however_small_the_cap():
    assert eagle_topk(candidates=2, budget=64, depth=7) * 6 >= 64


def test_a_chain_is_encoded_as_a_tree_so_that_its_path_is_moved():
    log_probs = tensor([[[0.0], [0.0], [0.0]]])
    assert encode(build_tree(log_probs, 3), 1, 3).topk == 2
