"""Regions of the KV cache: none is lent twice, and prompts are reused only when that was asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtree_reference.kv_pool import KVPool


def test_regions_are_lent_once_and_come_back() -> None:
    pool = KVPool(3, 100)
    taken = [pool.take([1, 2]) for _ in range(3)]
    assert pool.free == 0 and pool.take([1, 2]) is None
    regions = [lent[0] for lent in taken if lent is not None]
    assert sorted(region.base for region in regions) == [0, 100, 200]
    for region in regions:
        pool.give_back(region, [1, 2, 3])
    assert pool.free == pool.total == 3


def test_nothing_is_reused_unless_asked_for() -> None:
    pool = KVPool(1, 100)
    region, cached = pool.take([1, 2, 3]) or (None, -1)
    assert region is not None and cached == 0
    pool.give_back(region, [1, 2, 3, 4])
    assert pool.take([1, 2, 3]) == (region, 0)


def test_the_longest_shared_beginning_is_reused_and_one_token_is_left_to_compute() -> None:
    pool = KVPool(2, 100, reuse_prefixes=True)
    (first, _), (second, _) = pool.take([1]) or (None, 0), pool.take([2]) or (None, 0)
    assert first is not None and second is not None
    pool.give_back(first, [1, 2, 3, 4])
    pool.give_back(second, [1, 2, 9])
    assert pool.take([1, 2, 9, 9]) == (second, 3)
    assert pool.take([1, 2, 3, 4]) == (first, 3)
    pool.give_back(first, [1, 2, 3, 4])
    pool.flush()
    assert pool.take([1, 2, 3, 4]) == (first, 0)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=40))
def test_any_order_of_taking_and_giving_back_keeps_the_regions_apart(steps: list[tuple[bool, list[int]]]) -> None:
    pool = KVPool(3, 10, reuse_prefixes=True)
    lent = {}
    for take, prompt in steps:
        if take:
            taken = pool.take(prompt)
            assert (taken is None) == (len(lent) == 3)
            if taken is not None:
                region, cached = taken
                assert region.base not in lent and cached < len(prompt)
                assert region.tokens[:cached] == prompt[:cached]
                lent[region.base] = (region, prompt)
        elif lent:
            pool.give_back(*lent.pop(next(iter(lent))))
        assert pool.free == 3 - len(lent)
