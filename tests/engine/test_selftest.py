from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import chat_ids
from ddtree_reference import model, selftest, startup, tree
from ddtree_reference.model import KVCache, Target
from ddtree_reference.startup import Opened
from torch import Tensor


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
    result = selftest.run(toy.engine.target, toy.engine.cache, 12)
    assert result.widths == (2, 5, 8, 9, 12, 16, 17, 33, 65)
    assert result.rows >= 2 + 5 + 7 * 7 and result.differing == 0 and result.passed


def test_numbers_that_depend_on_the_row_count_are_found(toy: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = model.linear

    def row_dependent(x: Tensor, weight: Tensor) -> Tensor:
        return genuine(x, weight) * (1 + 1e-6 * (x.shape[0] > 1))

    monkeypatch.setattr(model, "linear", row_dependent)
    result = selftest.run(toy.engine.target, toy.engine.cache, 9)
    assert not result.passed and result.differing > 0


def fail_in_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = selftest.run

    def failing(target: Target, cache: KVCache, width: int) -> selftest.Result:
        result = genuine(target, cache, width)
        return replace(result, passed=False, differing=3) if target.numerics == "mixed" else result

    monkeypatch.setattr(selftest, "run", failing)


def test_failure_falls_back_to_fp32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_in_mixed(monkeypatch)
    opened = startup.open_engine("toy", "auto", 9)
    assert opened.engine.target.numerics == "fp32"
    assert opened.engine.target.embedding.dtype == opened.engine.drafter.fc.dtype == torch.float32
    assert "falling back to fp32" in caplog.text


def test_mixed_numerics_can_be_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fail_in_mixed(monkeypatch)
    opened = startup.open_engine("toy", "mixed", 9)
    assert opened.engine.target.numerics == "mixed" and not opened.self_test.passed
    assert "3 of" in caplog.text
