"""Regions of the KV cache: none is lent twice, and prompts are reused only when that was asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtree_reference.kv_pool import KVPool, Loan, Region


def take(pool: KVPool, prompt: list[int]) -> Loan:
    loan = pool.take(prompt)
    assert loan is not None
    return loan


def test_regions_are_lent_once_and_come_back() -> None:
    pool = KVPool(3, 100)
    regions = [take(pool, [1, 2]).region for _ in range(3)]
    assert pool.free == 0 and pool.take([1, 2]) is None
    assert sorted(region.base for region in regions) == [0, 100, 200]
    for region in regions:
        pool.give_back(region, [1, 2, 3])
    assert pool.free == pool.total == 3


def test_nothing_is_reused_unless_asked_for() -> None:
    pool = KVPool(1, 100)
    region = take(pool, [1, 2, 3]).region
    pool.give_back(region, [1, 2, 3, 4])
    assert take(pool, [1, 2, 3]) == Loan(region, 0, region.base)


def test_the_longest_shared_beginning_is_reused_and_one_token_is_left_to_compute() -> None:
    pool = KVPool(2, 100, reuse_prefixes=True)
    first, second = take(pool, [1]).region, take(pool, [2]).region
    pool.give_back(first, [1, 2, 3, 4])
    pool.give_back(second, [1, 2, 9])
    assert take(pool, [1, 2, 9, 9]) == Loan(second, 3, second.base)
    assert take(pool, [1, 2, 3, 4]) == Loan(first, 3, first.base)
    pool.give_back(first, [1, 2, 3, 4])
    pool.flush()
    assert take(pool, [1, 2, 3, 4]).cached == 0


def test_a_region_of_which_little_is_shared_is_copied_from_and_kept() -> None:
    pool = KVPool(3, 100, reuse_prefixes=True)
    old = take(pool, [0]).region
    pool.give_back(old, list(range(20)))
    loan = take(pool, [0, 1, 2, 3, 77])
    assert (loan.cached, loan.source) == (4, old.base) and loan.region is not old
    assert take(pool, [*range(20), 20]) == Loan(old, 20, old.base)
    assert take(pool, [0, 1, 2, 3, 77]).cached == 0, "what is lent is not there to be copied from"


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=40))
def test_any_order_of_taking_and_giving_back_keeps_the_regions_apart(steps: list[tuple[bool, list[int]]]) -> None:
    pool = KVPool(3, 10, reuse_prefixes=True)
    held: dict[int, list[int]] = {}
    lent: dict[int, tuple[Region, list[int]]] = {}
    for taking, prompt in steps:
        if taking:
            loan = pool.take(prompt)
            assert (loan is None) == (len(lent) == 3)
            if loan is not None:
                assert loan.region.base not in lent and loan.source not in lent and loan.cached < len(prompt)
                assert held.get(loan.source, [])[: loan.cached] == prompt[: loan.cached]
                lent[loan.region.base] = (loan.region, prompt)
        elif lent:
            region, tokens = lent.pop(next(iter(lent)))
            pool.give_back(region, tokens)
            held[region.base] = tokens
        assert pool.free == 3 - len(lent)
