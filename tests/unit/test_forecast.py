"""What `plan` prints of named comparisons: how many tests share Holm's correction, and which have no cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import keys, plan
from ddtree_bench.config import validate
from ddtree_bench.forecast import forecast, history
from ddtree_bench.project import Folders, Project
from ddtree_bench.records.store import Store
from ddtree_bench.status import CellStatus


def project(root: Path, comparisons: list[dict[str, Any]], model: str = "toy", **block: Any) -> Project:
    config = tree()
    config["models"]["toy"]["name"] = model
    config["sweep"][0] |= {"concurrency": [1, 2], "max_running_requests": 2} | block
    config["workloads"]["short"] |= {"n_min": 8, "open_loop_s": 4, "repeat_prompts": True}
    validated, points = validate({**config, "comparisons": comparisons}, write_project(root))
    built = plan.build(validated, points, root, {("local", "reference"): "e" * 64})
    return Project(validated, built, Folders.below(root / "results"), root, {("local", "reference"): "e" * 64})


def lines(root: Path, comparisons: list[dict[str, Any]]) -> str:
    return forecast(project(root, comparisons))


@pytest.mark.parametrize(
    ("comparison", "tests"),
    [
        ({"budget": 8, "concurrency": 1}, 1),
        ({"budget": 8}, 2),
        ({"concurrency": 2}, 2),
        ({}, 4),
    ],
)
def test_each_row_that_a_comparison_names_is_a_test(tmp_path: Path, comparison: dict[str, Any], tests: int) -> None:
    said = lines(tmp_path, [{"method": "DDTREE", "baseline": "AR", **comparison}])
    assert f"for the first of {tests} (Holm)" in said and "warning" not in said


def test_without_names_every_ratio_is_counted(tmp_path: Path) -> None:
    assert "for the first of 6 (Holm)" in lines(tmp_path, [])


def test_a_comparison_at_a_concurrency_that_is_not_planned_is_named(tmp_path: Path) -> None:
    said = lines(tmp_path, [{"method": "DDTREE", "baseline": "AR", "budget": 8, "concurrency": 4}])
    assert "warning: comparisons[0]: method DDTREE budget 8 concurrency 4 against AR is not in the sweep" in said


def measured(concurrency: int, seconds: int, rate: float | None = None, **more: Any) -> dict[str, Any]:
    """A record of an AR cell of 10 requests that took some seconds after a start that took 3 s."""
    load = {"concurrency": concurrency, "kind": "closed" if rate is None else "open", "rate": rate}
    identity = {
        "server": {"target": "local", "model": {"name": "toy"}, "method": "AR"},
        "workload": {"n_prompts": 10},
        "load": load,
        "of": [concurrency, seconds, rate, sorted(more)],
    }
    return {
        "plan_key": keys.digest(identity),
        "host_key": "f" * 64,
        "identity": identity,
        "status": "ok",
        "start_id": "abc",
        "ready_s": 2.0,
        "warmup": {"seconds": 1.0},
        "started_at": "2026-05-01T10:00:00.000+00:00",
        "ended_at": f"2026-05-01T10:00:{seconds:02d}.000+00:00",
    } | more


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    for record in (
        *(measured(1, 20), measured(8, 10)),
        measured(1, 50, aborted="the cell's deadline of 50 s was reached"),
        *(measured(1, 59, status="failed"), measured(256, 40, rate=0.5)),
    ):
        made.add(record, lambda _: None)
    return made


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        # 2 starts of 3 s. A cell has max(8, 4 C) requests, of 2 s at 1 in flight and of 1 s at 8; 4 is nearer to 8.
        ({"concurrency": 1}, 2 * (3 + 8 * 2)),
        ({"concurrency": 8, "max_running_requests": 8}, 2 * (3 + 32 * 1)),
        ({"concurrency": 2}, 2 * (3 + 8 * 2)),
        ({"concurrency": 4, "max_running_requests": 8}, 2 * (3 + 16 * 1)),
        # 8 requests that arrive at 2 a second.
        ({"concurrency": 8, "rate": 2}, 2 * (3 + 8 / 2)),
    ],
)
def test_time_is_that_of_earlier_cells_at_such_a_load(
    tmp_path: Path, store: Store, block: dict[str, Any], expected: float
) -> None:
    planned = project(tmp_path, [], method="AR", budget=None, **block)
    missing = [CellStatus(cell, None) for cell in planned.plan.cells]
    assert history(store).seconds(missing) == pytest.approx(expected)


@pytest.mark.parametrize(("methods", "model"), [(["AR", "DFLASH"], "toy"), (["AR"], "SmolLM2-135M-Instruct")])
def test_time_is_unknown_without_a_precedent(tmp_path: Path, store: Store, methods: list[str], model: str) -> None:
    planned = project(tmp_path, [], model, method=methods)
    assert history(store).seconds([CellStatus(cell, None) for cell in planned.plan.cells]) is None


def test_an_unknown_time_is_bounded_by_the_limits_of_starts_and_cells(tmp_path: Path) -> None:
    # 2 methods x 2 repeats, of 180 s each, and twice as many cells, of 2 h each.
    said = "one after another 4 starts take at most 0.2 h (start_timeout_s), and 8 cells at most 16 h (cell_timeout_s)"
    assert f"time: unknown: no earlier run; {said}" in forecast(project(tmp_path, [], method=["AR", "DFLASH"]))


def test_an_open_loop_that_is_hardly_open_is_named(tmp_path: Path) -> None:
    said = forecast(project(tmp_path, [], concurrency=[1, 2, 4], rate=[2]))
    (line,) = [line for line in said.splitlines() if line.startswith("warning")]
    assert line.startswith("warning: q2-c1: with at most 1 in flight, 2 requests/s are held back as soon as one takes")
    assert "longer than 0.5 s" in line
