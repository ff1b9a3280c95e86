"""Sweep blocks: products, include, exclude, and points that are equal in what counts."""

from __future__ import annotations

from typing import Any

from configurations import tree

from ddtree_bench.config.load import parse
from ddtree_bench.config.sweep import Coordinates, expand


def expanded(**block: Any) -> list[Coordinates]:
    config = tree()
    config["sweep"][0] |= block
    return expand(parse(config))


def trees(points: list[Coordinates]) -> list[tuple[int | None, int | None]]:
    return [(p.budget, p.topk_cap) for p in points if p.method == "DDTREE"]


def test_caps_beyond_the_budget_are_one_point() -> None:
    points = expanded(budget=[4, 8, 16], topk_cap=[8, 32, "budget"])
    assert trees(points) == [(4, 4), (8, 8), (16, 8), (16, 16)]


def test_axes_that_a_method_does_not_know_collapse() -> None:
    points = expanded(budget=[4, 8], block_size=[4, 8])
    assert sum(p.method == "AR" for p in points) == 1
    assert [p.block_size for p in points if p.method == "DFLASH"] == [4, 8]


def test_exclude_matches_every_key_given() -> None:
    points = expanded(
        budget=[4, 8, 16], topk_cap=[2, "budget"], exclude=[{"budget": 8, "topk_cap": "budget"}, {"budget": 4}]
    )
    assert trees(points) == [(8, 2), (16, 2), (16, 16)]
    assert any(p.method == "AR" for p in points)


def test_include_adds_a_point_with_the_blocks_first_values() -> None:
    points = expanded(include=[{"method": "DDTREE", "budget": 15, "topk_cap": 8}])
    added = points[-1]
    assert (added.method, added.budget, added.topk_cap, added.workload, added.max_running_requests) == (
        "DDTREE",
        15,
        8,
        "short",
        1,
    )


def test_equal_points_of_two_blocks_are_one() -> None:
    config = tree()
    config["sweep"].append(config["sweep"][0])
    assert expand(parse(config)) == expand(parse(tree()))


def test_flags_of_target_and_block_are_merged() -> None:
    config = tree()
    config["targets"]["local"]["flags"] = {"threads": "1", "x": "1"}
    config["sweep"][0]["flags"] = {"x": "2"}
    assert expand(parse(config))[0].flags == (("threads", "1"), ("x", "2"))


def loads(points: list[Coordinates]) -> list[tuple[int, float | None, str | None]]:
    return [(p.concurrency, p.rate, p.arrivals) for p in points if p.method == "AR"]


def test_without_a_rate_loads_are_closed_and_one_request_is_in_flight_by_default() -> None:
    assert loads(expanded(arrivals="constant")) == [(1, None, None)]


def test_a_rate_makes_open_loops_that_are_hardly_bounded_by_default() -> None:
    assert loads(expanded(rate=[0.5, 4])) == [(256, 0.5, "poisson"), (256, 4.0, "poisson")]


def test_with_a_rate_the_concurrency_is_the_most_in_flight() -> None:
    points = expanded(rate=[2], concurrency=[8, 16], arrivals="constant", exclude=[{"rate": 2, "concurrency": 16}])
    assert loads(points) == [(8, 2.0, "constant")]


def test_points_with_and_without_a_rate_can_be_planned_together() -> None:
    config = tree()
    config["sweep"].append({**config["sweep"][0], "rate": 3})
    assert loads(expand(parse(config))) == [(1, None, None), (256, 3.0, "poisson")]


def test_an_included_rate_has_a_bound_of_its_own() -> None:
    points = expanded(concurrency=[1, 4], include=[{"rate": 4}, {"rate": 5, "concurrency": 8}, {"concurrency": 2}])
    closed, opened = [(1, None, None), (4, None, None)], [(256, 4.0, "poisson"), (8, 5.0, "poisson")]
    assert loads(points) == [*closed, *opened, (2, None, None)]
