"""How long the SGLang plugin takes to build a batch of trees, against one Python heap a request, on one CPU thread.

    PYTHONPATH=envs/sglang/plugin python tests/benchmarks/tree_building.py [--rounds 60]

The heap is the embedded engine's. Each round draws new log-probabilities, times both on them, in alternating order, and
checks that the trees are equal, so the ratio is of the same work under the same load. The heap is timed twice: on lists
of floats, and with the conversion of the tensor to lists, which an engine that keeps them on the device has to pay.
Returns 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import NamedTuple

import torch

from ddtree_reference.tree import best_first
from sglang_ddtree.tree import DraftTree, TreeBuilder

VOCABULARY, SCALE = 1000, 3.0
"""Drafts are the best of a softmax over random normal logits of this size and scale."""


class Case(NamedTuple):
    """One shape, and what it has to reach: times faster than the heap on lists, and milliseconds a batch."""

    batch: int
    budget: int
    block: int
    cap: int
    faster: float | None = None
    milliseconds: float | None = None


CASES = (
    Case(64, 64, 16, 16, faster=5.0),
    Case(1, 16, 8, 8, milliseconds=0.2),
    Case(64, 16, 8, 8),
    Case(64, 16, 16, 16),
    Case(1, 64, 16, 16),
)


class Round(NamedTuple):
    """Milliseconds of one round."""

    batched: float
    heap: float
    heap_with_lists: float


def milliseconds(work: Callable[[], object]) -> float:
    """Wall milliseconds of one call."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def check_equal(trees: DraftTree, rows: list[list[list[float]]], budget: int) -> None:
    """Raise AssertionError unless every request's tree is the heap's, node by node."""
    for request, log_probs in enumerate(rows):
        expected = best_first(log_probs, budget)
        found = tuple(tuple(field[request].tolist()) for field in (trees.parents, trees.depths, trees.ranks))
        if found != (expected.parents[1:], expected.depths[1:], expected.ranks[1:]):
            raise AssertionError(f"request {request}: the tree is not the heap's")


def measure(case: Case, rounds: int) -> list[Round]:
    """Time both builders on `rounds` batches, after two that warm up."""
    depth = case.block - 1
    generator = torch.Generator().manual_seed(0)
    builder = TreeBuilder(depth, case.cap, case.budget, "cpu")
    found = []
    for number in range(rounds + 2):
        logits = torch.randn(case.batch, depth, VOCABULARY, generator=generator) * SCALE
        log_probs = torch.log_softmax(logits, -1).topk(case.cap).values
        rows = log_probs.tolist()
        work: dict[str, Callable[[], object]] = {
            "batched": lambda x=log_probs: builder(x),
            "heap": lambda x=rows: [best_first(request, case.budget) for request in x],
            "heap_with_lists": lambda x=log_probs: [best_first(request, case.budget) for request in x.tolist()],
        }
        names = list(work) if number % 2 else list(reversed(work))
        times = {name: milliseconds(work[name]) for name in names}
        check_equal(builder(log_probs), rows, case.budget)
        if number >= 2:
            found.append(Round(**times))
    return found


def spread(values: list[float], digits: int) -> str:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def report(case: Case, rounds: list[Round]) -> bool:
    """Print the case's times and ratios, and return whether it reaches its bars."""
    ratios = [r.heap / r.batched for r in rounds]
    with_lists = [r.heap_with_lists / r.batched for r in rounds]
    batched = [r.batched for r in rounds]
    print(f"batch {case.batch}, budget {case.budget}, block {case.block}, cap {case.cap}")
    print(f"  batched {spread(batched, 3)} ms, heap {spread([r.heap for r in rounds], 3)} ms")
    print(f"  heap / batched {spread(ratios, 2)}, with conversion to lists {spread(with_lists, 2)}")
    reached = True
    if case.faster is not None:
        reached = median(ratios) >= case.faster
        print(f"  bar: at least {case.faster} times faster: {'reached' if reached else 'missed'}")
    if case.milliseconds is not None:
        reached = median(batched) <= case.milliseconds
        print(f"  bar: at most {case.milliseconds} ms: {'reached' if reached else 'missed'}")
    return reached


def main() -> int:
    """Measure every case; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="batches a case, at least 2")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"one thread, {rounds} rounds a case; median (quartiles)")
    with torch.inference_mode():
        reached = [report(case, measure(case, rounds)) for case in CASES]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
