from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_server import chat_ids
from torch import Tensor

from ddtree_reference import decode, model, selftest, startup, tree
from ddtree_reference.decode import Method
from ddtree_reference.model import KVCache, Target
from ddtree_reference.startup import Opened


def run(opened: Opened, method: Method) -> selftest.Result:
    return selftest.run(opened.engine.target, opened.engine.cache, [method])


def row(target: Target, cache: KVCache, token: int, position: int) -> tuple[Tensor, Tensor]:
    hidden, _ = model.forward(target, cache, torch.tensor([token]), torch.tensor([position]), position, None)
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
    causal = torch.ones(start, start, dtype=torch.bool).tril()
    model.forward(target, cache, torch.tensor(prompt), torch.arange(start), 0, model.attention_mask(target, causal, 0))
    parents = [-1] + [rng.randrange(node) for node in range(1, nodes)]
    tokens = [rng.randrange(100, 8000) for _ in range(nodes)]
    depths = [0] * nodes
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    mask = model.attention_mask(target, torch.from_numpy(tree.visibility(parents)), start)
    hidden, _ = model.forward(target, cache, torch.tensor(tokens), torch.tensor(depths) + start, start, mask)
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
    assert result.contexts == (40, 600) and result.widths == (8, 12)
    assert result.rows == (2 + 7 * 5) + 2 * 5 and result.differing == 0 and result.passed


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
    seen = {step.width for step in decode.generate(toy.engine, method, prompt, 30) if step.verifies}
    assert seen <= set(widths)


def test_numbers_that_depend_on_the_row_count_are_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = model.linear

    def row_dependent(x: Tensor, weight: Tensor) -> Tensor:
        return genuine(x, weight) * (1 + 1e-6 * (x.shape[0] > 1))

    monkeypatch.setattr(model, "linear", row_dependent)
    result = run(toy, Method())
    assert not result.passed and result.differing > 0


def test_numbers_that_depend_on_the_methods_own_width_are_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = model.linear
    monkeypatch.setattr(model, "linear", lambda x, weight: genuine(x, weight) * (1 + 1e-6 * (x.shape[0] == 12)))
    assert run(toy, Method("DDTREE", budget=8)).passed
    assert run(toy, Method("DDTREE", budget=11)).differing == 5
    assert run(toy, Method("DFLASH", block_size=12)).differing == 5


def test_attention_that_fails_behind_a_long_context_only_is_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = model._attend

    def long_dependent(*arguments: Any) -> Tensor:
        end, mask = arguments[4:6]
        return genuine(*arguments) * (1 + 1e-2 * (mask is not None and end > 512))

    monkeypatch.setattr(model, "_attend", long_dependent)
    result = run(toy, Method("DDTREE", budget=8))
    assert result.differing == 2 * 5, "both widths of the method, and none of the short context"


def test_scores_that_differ_without_changing_a_choice_are_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = model.rescore

    def row_dependent(target: Target, scores: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        candidates, rescored = genuine(target, scores, normed)
        return candidates, rescored * (1 + 1e-6 * (scores.shape[0] > 1))

    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    chosen = model.choose(toy.engine.target, hidden)
    monkeypatch.setattr(model, "rescore", row_dependent)
    assert model.choose(toy.engine.target, hidden) == chosen
    assert not run(toy, Method()).passed


def fail_in_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = selftest.run

    def failing(target: Target, cache: KVCache, methods: Sequence[Method]) -> selftest.Result:
        result = genuine(target, cache, methods)
        return replace(result, passed=False, differing=3) if target.numerics == "mixed" else result

    monkeypatch.setattr(selftest, "run", failing)


def test_failure_falls_back_to_fp32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_in_mixed(monkeypatch)
    opened = startup.open_engine("toy", "auto", [Method()])
    assert opened.engine.target.numerics == "fp32"
    assert opened.engine.target.embedding.dtype == opened.engine.drafter.fc.dtype == torch.float32
    assert "falling back to fp32" in caplog.text


def test_mixed_numerics_can_be_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fail_in_mixed(monkeypatch)
    opened = startup.open_engine("toy", "mixed", [Method()])
    assert opened.engine.target.numerics == "mixed" and not opened.self_test.passed
    assert "3 of" in caplog.text
