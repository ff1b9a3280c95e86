"""The Triton kernel against the PyTorch builder, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from sglang_ddtree.tree import TreeBuilder, build_tree, most_nodes
from sglang_ddtree.tree_kernel import KernelTreeBuilder, build_tree_triton, tree_builder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drafts(depth: int, candidates: int) -> torch.Tensor:
    """Log-probabilities of seven requests: flat to peaked, tied, uniform, with impossible tokens, and broken ones."""
    generator = torch.Generator().manual_seed(depth * 100 + candidates)
    scale = torch.tensor([0.5, 2.0, 8.0, 1.0, 1.0, 2.0, 1.0]).view(-1, 1, 1)
    log_probs = torch.log_softmax(torch.randn(len(scale), depth, 40, generator=generator) * scale, -1)
    log_probs = log_probs.topk(candidates).values
    log_probs[3] = (log_probs[3] * 2).round() / 2
    log_probs[4] = -1.0
    log_probs[5, :, (candidates + 1) // 2 :] = -torch.inf
    log_probs[6, 0, 0] = 1e-6
    log_probs[6, depth - 1] = torch.nan
    return log_probs.to(DEVICE)


def assert_same(depth: int, candidates: int, budgets: tuple[int, ...]) -> None:
    log_probs = drafts(depth, candidates)
    for budget in budgets:
        if budget <= most_nodes(depth, candidates):
            expected = build_tree(log_probs, budget)
            for name, value in build_tree_triton(log_probs, budget)._asdict().items():
                assert value.dtype == getattr(expected, name).dtype
                assert torch.equal(value, getattr(expected, name)), (budget, name)


@pytest.mark.parametrize(("depth", "candidates"), [(1, 1), (1, 16), (3, 2), (7, 3)])
def test_kernel_equals_the_torch_builder(depth, candidates):
    assert_same(depth, candidates, (1, 2, 3, 7, 8))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 7, 15])
@pytest.mark.parametrize("candidates", [1, 4, 16])
def test_kernel_equals_the_torch_builder_on_large_trees(depth, candidates):
    assert_same(depth, candidates, (16, 17, 64))


def test_kernel_equals_the_torch_builder_where_float64_sums_round():
    first, second = [-1e-20, -2e-20, -3e-20, -1.0], [-1.0, -1.0, -3e38, -3e38]
    log_probs = torch.tensor([[first, second], [second, first]], device=DEVICE)
    for budget in (5, 20):
        for found, expected in zip(build_tree_triton(log_probs, budget), build_tree(log_probs, budget), strict=True):
            assert torch.equal(found, expected)


def test_kernel_adds_in_float64():
    # In float32 -6e-7 - 8 is -8 - 2**-20: (1, 0) would tie with (0, 1), and come after it.
    log_probs = torch.tensor([[[0.0, -6e-7], [-8.0, -8.0 - 2**-20]]], device=DEVICE)
    trees = build_tree_triton(log_probs, 6)
    assert trees.ranks.tolist() == [[0, 1, 0, 0, 1, 1]]
    assert trees.parents.tolist() == [[0, 0, 1, 2, 1, 2]]


def test_kernel_reads_log_probabilities_that_are_not_contiguous():
    log_probs = drafts(4, 6)[..., ::2]
    assert not log_probs.is_contiguous()
    for found, expected in zip(build_tree_triton(log_probs, 5), build_tree(log_probs, 5), strict=True):
        assert torch.equal(found, expected)


def test_kernel_of_an_empty_batch_has_no_trees():
    assert [list(x.shape) for x in build_tree_triton(torch.zeros(0, 3, 4, device=DEVICE), 5)] == [[0, 5]] * 4


def test_kernel_refuses_what_the_torch_builder_refuses():
    with pytest.raises(ValueError, match="budget 4 is more than the 3 nodes"):
        build_tree_triton(torch.zeros(1, 3, 1, device=DEVICE), 4)
    with pytest.raises(ValueError, match=r"shape \[1, 3, 1\], not \[batch, 3, 2\]"):
        KernelTreeBuilder(3, 2, 4)(torch.zeros(1, 3, 1, device=DEVICE))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from sglang_ddtree.tree_kernel import _best_first

pointers = {"log_probs": "*fp32", "ranks": "*i64", "depths": "*i64", "parents": "*i64", "scores": "*fp64"}
constants = {"DEPTH": 15, "CANDIDATES": 16, "BUDGET": 33, "FRONTIER": 64}
signature = {**pointers, "request_stride": "i32", **dict.fromkeys(constants, "constexpr")}
places = {(list(signature).index(name),): value for name, value in constants.items()}
for capability in (80, 90, 100):
    source = ASTSource(_best_first, signature, constexprs=places)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    assert f".target sm_{capability}" in compiled.asm["ptx"] and compiled.asm["cubin"]
    print(capability)
"""


@pytest.mark.slow
def test_kernel_compiles_for_nvidia_gpus(tmp_path):
    # Compiling needs no GPU, but a process in which the interpreter is off.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["80", "90", "100"]


def test_processors_get_the_torch_builder():
    assert isinstance(tree_builder(3, 2, 4, "cpu"), TreeBuilder)
