"""Continuous batching: who joins when, that nobody starves, and that a batch changes no answer."""

from __future__ import annotations

from random import Random

import pytest
from engine_server import chat_ids

from ddtree_reference import decode, startup
from ddtree_reference.method import Method
from ddtree_reference.sampling import GREEDY, Sampling
from ddtree_reference.scheduler import Scheduler
from ddtree_reference.sequence import Request
from ddtree_reference.startup import Opened

METHODS = [Method("AR"), Method("DFLASH"), Method("DDTREE", budget=4), Method("DDTREE", budget=32, topk_cap=32)]
WORDS = ["Write a poem", "hello", "2+2", "Explain rain", "a", "The cat sat on the mat", "0", "Why?", "zebra", "x y z"]


def alone(opened: Opened, method: Method, request: Request) -> list[int]:
    return [token for step in decode.generate(opened.engine, method, request) for token in step.tokens]


def requests(opened: Opened, count: int, sampling: Sampling = GREEDY) -> dict[int, Request]:
    """Requests of different lengths, so that they leave the batch at different times."""
    return {
        n: Request(tuple(chat_ids(opened, WORDS[n % len(WORDS)] * (1 + n // 3))), 3 + 7 * n % 40, None, sampling)
        for n in range(count)
    }


def drain(scheduler: Scheduler[int], answers: dict[int, list[int]]) -> None:
    while scheduler.running or scheduler.waiting:
        for advance in scheduler.step():
            answers.setdefault(advance.key, []).extend(advance.round.tokens)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.algorithm}-{method.budget}")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_a_changing_batch_equal_those_decoded_alone(toy: Opened, method: Method, temperature: float) -> None:
    wanted = requests(toy, 20, Sampling(temperature, 0.9, 40, seed=7))
    expected = {key: alone(toy, Method("AR"), request) for key, request in wanted.items()}
    scheduler: Scheduler[int] = Scheduler(toy.engine, method)
    answers: dict[int, list[int]] = {}
    for key, request in wanted.items():
        scheduler.add(key, request)
        if key % 3 == 0:
            for advance in scheduler.step():
                answers.setdefault(advance.key, []).extend(advance.round.tokens)
    drain(scheduler, answers)
    assert answers == expected
    assert toy.engine.pool.free == toy.engine.pool.total


def test_real_answers_of_a_changing_batch_equal_those_decoded_alone(smollm2: Opened) -> None:
    texts = ["Write a haiku about rain", "What is 2+2?", "Write a quicksort in Python", "Explain tides"]
    wanted = {n: Request(tuple(chat_ids(smollm2, text)), 9 + 3 * n) for n, text in enumerate(texts)}
    expected = {key: alone(smollm2, Method("AR"), request) for key, request in wanted.items()}
    for method in METHODS:
        scheduler: Scheduler[int] = Scheduler(smollm2.engine, method)
        answers: dict[int, list[int]] = {key: [] for key in wanted}
        for key, request in wanted.items():
            scheduler.add(key, request)
            for advance in [*scheduler.step(), *scheduler.step()]:
                answers[advance.key] += advance.round.tokens
        drain(scheduler, answers)
        assert answers == expected


def test_requests_join_in_order_as_others_leave(toy: Opened) -> None:
    scheduler: Scheduler[int] = Scheduler(toy.engine, Method("AR"))
    for key in range(12):
        scheduler.add(key, Request((65 + key, 66), 10 if key else 3))
    seen: list[set[int]] = []
    while scheduler.running or scheduler.waiting:
        assert scheduler.running + scheduler.waiting <= 12
        seen.append({advance.key for advance in scheduler.step()})
    assert seen[0] == set(range(8)), "eight regions, the first eight requests"
    joined = next(n for n, keys in enumerate(seen) if 8 in keys)
    assert 0 not in seen[joined] and all(8 in keys or joined > n for n, keys in enumerate(seen[: joined + 5]))
    assert [min(n for n, keys in enumerate(seen) if key in keys) for key in range(12)] == sorted(
        min(n for n, keys in enumerate(seen) if key in keys) for key in range(12)
    )


def test_a_long_prompt_does_not_hold_up_those_that_decode(toy: Opened) -> None:
    scheduler: Scheduler[str] = Scheduler(toy.engine, Method("AR"))
    scheduler.add("short", Request((65, 66), 30))
    scheduler.step()
    scheduler.add("long", Request(tuple([67] * (4 * decode.PREFILL_CHUNK)), 2))
    for chunk in range(4):
        keys = [advance.key for advance in scheduler.step()]
        assert "short" in keys, "it advances while the prompt is computed"
        assert ("long" in keys) == (chunk == 3)
    scheduler.drop("short")
    scheduler.drop("long")
    assert scheduler.running == 0 and toy.engine.pool.free == toy.engine.pool.total


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_dropped_request_frees_its_region_and_leaves_the_others_alone(toy: Opened, steps: int) -> None:
    scheduler: Scheduler[int] = Scheduler(toy.engine, Method("DDTREE"))
    wanted = requests(toy, 10)
    for key, request in wanted.items():
        scheduler.add(key, request)
    answers: dict[int, list[int]] = {}
    for _ in range(steps):
        for advance in scheduler.step():
            answers.setdefault(advance.key, []).extend(advance.round.tokens)
    for key in (2, 9, 77):
        scheduler.drop(key)
    drain(scheduler, answers)
    for key, request in wanted.items():
        if key not in (2, 9):
            assert answers[key] == alone(toy, Method("AR"), request)
    assert toy.engine.pool.free == toy.engine.pool.total


def test_a_request_beyond_the_context_is_refused_when_it_comes(toy: Opened) -> None:
    scheduler: Scheduler[int] = Scheduler(toy.engine, Method("AR"))
    with pytest.raises(ValueError, match="2000 prompt tokens and 49 new ones"):
        scheduler.add(1, Request((65,) * 2000, 49))
    assert scheduler.waiting == 0


@pytest.mark.parametrize("method", METHODS[1:3], ids=lambda method: method.algorithm)
def test_reused_prefixes_are_counted_and_change_no_answer(method: Method) -> None:
    opened = startup.open_engine("toy", "auto", [method], sequences=2, reuse_prefixes=True)
    prompt = tuple(chat_ids(opened, "The cat sat on the mat and looked at the dog"))
    other = (*prompt[:20], *chat_ids(opened, "Something else"))
    plain = startup.open_engine("toy", "auto", [method])
    expected = {request: alone(plain, Method("AR"), Request(request, 25)) for request in (prompt, other)}
    scheduler: Scheduler[str] = Scheduler(opened.engine, method)

    def answer(request: tuple[int, ...]) -> tuple[list[int], int]:
        scheduler.add("it", Request(request, 25))
        tokens, cached = [], set()
        while scheduler.running or scheduler.waiting:
            for advance in scheduler.step():
                tokens += advance.round.tokens
                cached.add(advance.cached)
        [count] = cached
        return tokens, count

    assert answer(prompt) == (expected[prompt], 0)
    assert answer(prompt) == (expected[prompt], len(prompt) - 1)
    assert answer(other) == (expected[other], 20), "copied: the first prompt keeps its region"
    assert answer(prompt) == (expected[prompt], len(prompt) - 1)
    opened.engine.pool.flush()
    assert answer(other) == (expected[other], 0)


@pytest.mark.parametrize("seed", range(3))
def test_conversations_that_go_on_from_reused_answers_change_nothing(seed: int) -> None:
    random = Random(seed)
    method = METHODS[1 + seed]
    opened = startup.open_engine("toy", "auto", [method], sequences=3, reuse_prefixes=True)
    plain = startup.open_engine("toy", "auto", [method])
    scheduler: Scheduler[int] = Scheduler(opened.engine, method)
    texts = [tuple(chat_ids(opened, text)) for text in ("The cat sat on the mat", "The cat sat still")]
    wanted: dict[int, Request] = {}
    answers: dict[int, list[int]] = {}
    cached = 0
    for key in range(25):
        wanted[key] = Request(random.choice(texts), random.randint(1, 30), random.choice([None, 32, 101]))
        scheduler.add(key, wanted[key])
        if random.random() < 0.2:
            scheduler.drop(key)
            del wanted[key]
        while scheduler.running + scheduler.waiting > random.randint(0, 3):
            for advance in scheduler.step():
                answers.setdefault(advance.key, []).extend(advance.round.tokens)
                cached += advance.cached
                if advance.finished:
                    whole = (*wanted[advance.key].prompt, *answers[advance.key])
                    texts.append(whole[: random.randint(len(whole) // 2, len(whole))])
    drain(scheduler, answers)
    for key, request in wanted.items():
        assert answers[key] == alone(plain, Method("AR"), request)
    assert cached > 0 and opened.engine.pool.free == 3


@pytest.mark.parametrize("dropped_after", [0, 1, 2])
def test_a_prompt_dropped_in_the_middle_of_its_prefill_leaves_nothing_wrong(dropped_after: int) -> None:
    method = Method("DDTREE")
    opened = startup.open_engine("toy", "auto", [method], sequences=1, reuse_prefixes=True)
    prompt = tuple(random_tokens(3 * decode.PREFILL_CHUNK))
    scheduler: Scheduler[str] = Scheduler(opened.engine, method)
    scheduler.add("dropped", Request(prompt, 5))
    for _ in range(dropped_after):
        assert scheduler.step() == []
    scheduler.drop("dropped")
    scheduler.add("again", Request(prompt, 20))
    tokens: list[int] = []
    cached = set()
    while scheduler.running or scheduler.waiting:
        for advance in scheduler.step():
            tokens += advance.round.tokens
            cached.add(advance.cached)
    assert cached == {dropped_after * decode.PREFILL_CHUNK}
    plain = startup.open_engine("toy", "auto", [method])
    assert tokens == alone(plain, Method("AR"), Request(prompt, 20))


def random_tokens(count: int) -> list[int]:
    random = Random(1)
    return [random.randrange(97, 123) for _ in range(count)]
