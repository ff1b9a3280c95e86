"""Speculation at temperature 1 leaves the law of the text as it is: drawn answers against the exact law of AR."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from scipy import stats

from ddtree_reference import decode, linear, model, sampling, toy, tree
from ddtree_reference.decode import Engine
from ddtree_reference.method import Method
from ddtree_reference.sampling import Sampling
from ddtree_reference.scheduler import Scheduler
from ddtree_reference.sequence import Request

ALPHABET = tuple(range(97, 103))
PROMPT = (97, 98, 99, 97, 98)
TOKENS = 4
DRAWS = 20_000
REJECT_BELOW = 0.001
CHAIN = Method("DFLASH", block_size=TOKENS)
TREE = Method("DDTREE", block_size=TOKENS, budget=4, topk_cap=4)

Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A toy that speaks six letters and often repeats itself, so that a third of the drafts is accepted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "GAIN", 1.0)
        target = toy.build_target("mixed", 64)
    head = target.head * 0.1
    silent = [token for token in range(target.config.vocab_size) if token not in ALPHABET]
    head[silent] = 0
    head[silent, toy.TOKEN_MARK] = -60
    target = replace(target, head=head, packed_head=linear.pack(head))
    return decode.new_engine(target, toy.build_drafter(target), TREE.verify_width, sequences=64)


def next_token(engine: Engine, tokens: tuple[int, ...]) -> dict[int, float]:
    """The exact law of the token that AR draws after `tokens`."""
    rows = len(tokens)
    spans = [model.causal_span(engine.target, 0, 0, rows)]
    hidden, _ = model.forward(engine.target, engine.cache, torch.tensor(tokens), torch.arange(rows), spans)
    scores, _ = model.logits(engine.target, hidden[-1:])
    probabilities = torch.softmax(scores[0].double(), -1)
    return {token: float(probabilities[token]) for token in ALPHABET}


@pytest.fixture(scope="module")
def exact(engine: Engine) -> Law:
    """The joint law of tokens 2 to 4, summed over the first one."""
    paths: Law = {(): 1.0}
    for _ in range(TOKENS):
        paths = {
            (*path, token): p * q
            for path, p in paths.items()
            for token, q in next_token(engine, (*PROMPT, *path)).items()
        }
    law: Law = {}
    for path, p in paths.items():
        law[path[1:]] = law.get(path[1:], 0.0) + p
    assert 0.999 < sum(law.values()) <= 1, "other letters hardly ever come"
    return law


def drawn(engine: Engine, method: Method, draws: int) -> tuple[Counter[tuple[int, ...]], float]:
    """How often each joint outcome of tokens 2 to 4 came, and the share of drafts that were accepted."""
    scheduler: Scheduler[int] = Scheduler(engine, method)
    answers: dict[int, list[int]] = {}
    for seed in range(draws):
        scheduler.add(seed, Request(PROMPT, TOKENS, None, Sampling(temperature=1.0, seed=seed)))
    accepted = proposed = 0
    while scheduler.running or scheduler.waiting:
        for advance in scheduler.step():
            answers.setdefault(advance.key, []).extend(advance.round.tokens)
            accepted += advance.round.accepted
            proposed += max(0, advance.round.width - 1)
    return Counter(tuple(answer[1:]) for answer in answers.values()), accepted / proposed


def p_value(law: Law, counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square of the counts; outcomes expected less than five times, and other letters, are put together."""
    draws = sum(counts.values())
    common = [path for path, p in law.items() if p * draws >= 5]
    expected = [law[path] * draws for path in common]
    observed = [counts[path] for path in common]
    rare = draws - sum(expected)
    if rare >= 5:
        expected.append(rare)
        observed.append(draws - sum(observed))
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize("method", [CHAIN, TREE], ids=lambda method: method.algorithm)
def test_the_joint_law_of_tokens_2_to_4_is_that_of_ar(engine: Engine, exact: Law, method: Method) -> None:
    counts, acceptance = drawn(engine, method, DRAWS)
    assert sum(counts.values()) == DRAWS
    assert acceptance >= 0.3
    assert p_value(exact, counts) > REJECT_BELOW


def biased_walk(parents: Sequence[int], tokens: Sequence[int], choose: Callable[[int], int]) -> tuple[list[int], int]:
    """A walk that prefers drafts: where the target takes none, it takes the first one in a third of the cases."""
    path, token = tree_walk(parents, tokens, choose)
    children = [node for node in range(1, len(parents)) if parents[node] == path[-1]]
    if children and hash((tuple(tokens), token)) % 3 == 0:
        path = [*path, children[0]]
        token = choose(children[0])
    return path, token


def wrong_sibling(parents: Sequence[int], tokens: Sequence[int], choose: Callable[[int], int]) -> tuple[list[int], int]:
    """A walk that mistakes a sibling for the node that the target has chosen."""
    path, token = tree_walk(parents, tokens, choose)
    siblings = [node for node in range(1, len(parents)) if len(path) > 1 and parents[node] == path[-2]]
    if siblings and siblings[-1] != path[-1]:
        path = [*path[:-1], siblings[-1]]
        token = choose(siblings[-1])
    return path, token


tree_walk = tree.walk


@pytest.mark.parametrize(("mutant", "method"), [(biased_walk, CHAIN), (biased_walk, TREE), (wrong_sibling, TREE)])
def test_walks_that_change_the_law_are_found(
    engine: Engine,
    exact: Law,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[..., tuple[list[int], int]],
    method: Method,
) -> None:
    monkeypatch.setattr(tree, "walk", mutant)
    counts, _ = drawn(engine, method, DRAWS // 5)
    assert p_value(exact, counts) < REJECT_BELOW


def test_the_distribution_is_cut_by_top_k_and_top_p() -> None:
    scores = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()[[3, 0, 4, 1, 2]]

    def law(**cuts: float) -> dict[int, float]:
        ids, probabilities = sampling.distribution(scores, Sampling(1.0, **cuts))  # type: ignore[arg-type]
        return {token: round(p, 4) for token, p in zip(ids.tolist(), probabilities.tolist(), strict=True)}

    assert law() == {1: 0.5, 3: 0.2, 4: 0.15, 0: 0.1, 2: 0.05}
    assert law(top_k=2) == {1: 0.7143, 3: 0.2857}
    assert law(top_p=0.69) == law(top_k=2), "0.5 + 0.2 reaches 0.69"
    assert law(top_p=0.71) == law(top_k=3)
    assert law(top_p=1e-6) == {1: 1.0}
    assert law(top_k=2, top_p=0.9) == law(top_k=2)
    hot = sampling.distribution(scores, Sampling(2.0))[1]
    assert hot[1] < 0.5 and abs(float(hot.sum()) - 1) < 1e-12


def test_top_p_over_a_large_vocabulary_equals_the_plain_definition() -> None:
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 3
    probabilities = torch.softmax(scores, -1).double()
    order = probabilities.argsort(descending=True)
    for top_p in (0.1, 0.5, 0.9, 0.99, 0.9999):
        mass = probabilities[order].cumsum(0)
        wanted = order[: int((mass - probabilities[order] < top_p).sum())]
        ids, kept = sampling.distribution(scores, Sampling(1.0, top_p))
        assert set(ids.tolist()) == set(wanted.tolist())
        assert torch.allclose(kept, probabilities[ids] / probabilities[ids].sum())


def test_draws_invert_the_cumulative_distribution() -> None:
    scores = torch.tensor([0.25, 0.5, 0.25]).log()
    sampled = Sampling(1.0)
    assert [sampling.draw(scores, sampled, u) for u in (0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999999)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


def test_equal_logits_leave_something_to_draw_from_at_any_top_p() -> None:
    for count in (7, 258, 49152):
        for top_p in (1e-9, 1e-3, 0.5):
            assert 0 <= sampling.draw(torch.zeros(count), Sampling(1.0, top_p), 0.3) < count


def test_top_p_1_cuts_nothing_beside_top_k() -> None:
    scores = torch.tensor([0.0, -30.0, -40.0])
    assert len(sampling.distribution(scores, Sampling(1.0, 1.0, top_k=2))[0]) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0: at least 0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0: above 0"),
        ({"top_k": 0}, "top_k 0: at least 1"),
        ({"seed": -1}, "seed -1: at least 0"),
    ],
)
def test_numbers_out_of_bounds_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


def test_a_seed_fixes_the_numbers_whatever_their_count() -> None:
    few, many = sampling.uniforms(5, 3), sampling.uniforms(5, 300)
    assert few.tolist() == many[:3].tolist() and ((many >= 0) & (many < 1)).all()
    assert few.tolist() != sampling.uniforms(6, 3).tolist()
