from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from engine_server import chat_ids
from torch import Tensor

from ddtree_reference import decode, linear, model, selftest, startup
from ddtree_reference.method import Method
from ddtree_reference.model import Span, Target
from ddtree_reference.sequence import Request
from ddtree_reference.startup import Opened


def run(opened: Opened, method: Method, sequences: int = 1) -> selftest.Result:
    return selftest.run(opened.engine.target, [method], sequences)


def row(target: Target, cache: Tensor, token: int, position: int) -> tuple[Tensor, Tensor]:
    hidden, _ = model.forward(
        target, cache, torch.tensor([token]), torch.tensor([position]), [Span(0, position, 1, None)]
    )
    return hidden[0], model.logits(target, hidden)[0][0]


@pytest.mark.parametrize(("nodes", "seed"), [(5, 0), (9, 1), (17, 2), (33, 3), (65, 4)])
def test_tree_rows_are_bit_identical_to_rows_computed_alone(smollm2: Opened, nodes: int, seed: int) -> None:
    if smollm2.engine.target.numerics != "mixed":
        pytest.skip("this CPU's bf16 kernels are not row-invariant: the engine runs in fp32")
    target, cache = smollm2.engine.target, smollm2.engine.cache
    rng = random.Random(seed)
    prompt = chat_ids(smollm2, "Write a Python function to reverse a string")
    prompt += [rng.randrange(100, 8000) for _ in range(23 * seed)]
    start = len(prompt)
    spans = [model.causal_span(target, 0, 0, start)]
    model.forward(target, cache, torch.tensor(prompt), torch.arange(start), spans)
    parents = [-1] + [rng.randrange(node) for node in range(1, nodes)]
    tokens = [rng.randrange(100, 8000) for _ in range(nodes)]
    depths = [0] * nodes
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    spans = [model.tree_span(target, 0, start, parents)]
    hidden, _ = model.forward(target, cache, torch.tensor(tokens), torch.tensor(depths) + start, spans)
    logits, _ = model.logits(target, hidden)
    path, node = [], depths.index(max(depths))
    while node >= 0:
        path.append(node)
        node = parents[node]
    for depth, node in enumerate(reversed(path)):
        alone_hidden, alone_logits = row(target, cache, tokens[node], start + depth)
        assert torch.equal(alone_hidden, hidden[node])
        assert torch.equal(alone_logits, logits[node])


def test_the_result_counts_what_it_compared(toy: Opened) -> None:
    result = run(toy, Method("DDTREE", budget=11))
    assert result.contexts == (40, 600) and result.widths == (8, 12) and result.batch_rows == (100, 256)
    assert result.rows == (2 + 7 * 5) + 2 * 5 + 2 * 5 and result.differing == 0 and result.passed


@pytest.mark.parametrize(
    ("method", "widths"),
    [
        (Method(), (8,)),
        (Method("DFLASH", block_size=16), (16,)),
        (Method("DDTREE", budget=8), (8, 9)),
        (Method("DDTREE", budget=64, topk_cap=1), (8,)),
        (Method("DDTREE", budget=1), (2, 8)),
        (Method("DDTREE", block_size=3, budget=64, topk_cap=2), (3, 7)),
    ],
)
def test_the_widths_are_those_the_method_verifies_with(toy: Opened, method: Method, widths: tuple[int, ...]) -> None:
    assert run(toy, method).widths == widths
    prompt = chat_ids(toy, "hello")
    seen = {step.width for step in decode.generate(toy.engine, method, Request(tuple(prompt), 30)) if step.verifies}
    assert seen <= set(widths)


def skew(monkeypatch: pytest.MonkeyPatch, factor: Callable[[int], float]) -> None:
    """Have products of many rows differ from those of one by a factor of the row count."""
    genuine = linear._product
    monkeypatch.setattr(linear, "_product", lambda layer, n, x: genuine(layer, n, x) * factor(x.shape[0]))


def test_numbers_that_depend_on_the_row_count_are_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    skew(monkeypatch, lambda rows: 1 + 0.01 * (rows > 1))
    result = run(toy, Method())
    assert not result.passed and result.differing > 0


def test_numbers_that_depend_on_the_methods_own_width_are_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    skew(monkeypatch, lambda rows: 1 + 0.01 * (rows == 12))
    assert run(toy, Method("DDTREE", budget=8)).passed
    assert run(toy, Method("DDTREE", budget=11)).differing == 5
    assert run(toy, Method("DFLASH", block_size=12)).differing == 5


@pytest.mark.parametrize(
    ("method", "sequences", "rows"),
    [
        (Method("DDTREE", budget=11), 4, 4 * 12),
        (Method("DDTREE", budget=11), 4, 2 * 12),
        (Method("DDTREE", budget=13), 4, 3 * 14),
        (Method("AR"), 7, 7),
        (Method("AR"), 7, 3),
        (Method("DFLASH"), 1, 100),
        (Method("DDTREE", budget=8), 1, 256),
        (Method("DDTREE", budget=8), 1000, 512),
    ],
)
def test_numbers_that_depend_on_a_batch_are_found(
    toy: Opened, monkeypatch: pytest.MonkeyPatch, method: Method, sequences: int, rows: int
) -> None:
    assert rows in run(toy, method, sequences).batch_rows
    skew(monkeypatch, lambda count: 1 + 0.01 * (count == rows))
    assert run(toy, method, sequences).differing > 0
    assert rows in selftest.PREFILL_ROWS or run(toy, method, 1).passed


def test_numbers_that_are_wrong_at_the_end_of_a_batch_only_are_found(
    toy: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = linear._product

    def tail(layer: linear.Linear, n: int, x: Tensor) -> Tensor:
        product = genuine(layer, n, x)
        product[36:] *= 1.01 if len(x) == 48 else 1
        return product

    monkeypatch.setattr(linear, "_product", tail)
    assert run(toy, Method("DDTREE", budget=11), sequences=4).differing > 0


def test_a_short_context_is_tested_as_far_as_it_goes() -> None:
    opened = startup.open_engine("toy", "auto", [Method("DDTREE")], max_context=100)
    assert opened.self_test.passed and opened.self_test.contexts == (40, 60)


def test_attention_that_fails_behind_a_long_context_only_is_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = model.attend

    def long_dependent(q: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
        return genuine(q, seen, mask) * (1 + 1e-2 * (mask is not None and seen.shape[0] > 512))

    monkeypatch.setattr(model, "attend", long_dependent)
    result = run(toy, Method("DDTREE", budget=8))
    assert result.differing == 4 * 5, "both widths of the method and two batches, and none of the short context"


def test_scores_that_differ_without_changing_a_choice_are_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = model.rescore

    def row_dependent(target: Target, scores: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        candidates, rescored = genuine(target, scores, normed)
        return candidates, rescored * (1 + 1e-6 * (scores.shape[0] > 1))

    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    target = toy.engine.target
    chosen = model.pick(target, *model.logits(target, hidden))
    monkeypatch.setattr(model, "rescore", row_dependent)
    assert model.pick(target, *model.logits(target, hidden)) == chosen
    assert not run(toy, Method()).passed


def fail_in_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = selftest.run

    def failing(target: Target, methods: Sequence[Method], sequences: int) -> selftest.Result:
        result = genuine(target, methods, sequences)
        return replace(result, passed=False, differing=3) if target.numerics == "mixed" else result

    monkeypatch.setattr(selftest, "run", failing)


def test_failure_falls_back_to_fp32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_in_mixed(monkeypatch)
    opened = startup.open_engine("toy", "auto", [Method()])
    assert opened.engine.target.numerics == "fp32"
    assert opened.engine.target.embedding.dtype == opened.engine.drafter.dtype == torch.float32
    assert "falling back to fp32" in caplog.text


def test_mixed_numerics_can_be_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fail_in_mixed(monkeypatch)
    opened = startup.open_engine("toy", "mixed", [Method()])
    assert opened.engine.target.numerics == "mixed" and not opened.self_test.passed
    assert "3 of" in caplog.text
