"""What `plan` prints of named comparisons: how many tests share Holm's correction, and which have no cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import plan
from ddtree_bench.config import validate
from ddtree_bench.forecast import forecast
from ddtree_bench.project import Folders, Project


def lines(root: Path, comparisons: list[dict[str, Any]]) -> str:
    config = tree()
    config["sweep"][0] |= {"concurrency": [1, 2], "max_running_requests": 2}
    config["workloads"]["short"]["n_min"] = 8
    validated, points = validate({**config, "comparisons": comparisons}, write_project(root))
    built = plan.build(validated, points, root, {"reference": "e" * 64})
    return forecast(Project(validated, built, Folders.below(root / "results"), root, {"reference": "e" * 64}))


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
