"""What the closing lines, `explain` and `retry_failed` say of cells, by their views and by the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import plan
from ddtree_bench.config import validate
from ddtree_bench.explain import _reason
from ddtree_bench.project import Folders, Project
from ddtree_bench.records.store import Attempt
from ddtree_bench.status import CellStatus, runs_with_failures, summary

DEADLINE = "the cell's deadline of 3 s was reached"
OK: dict[str, Any] = {"status": "ok", "reason": None, "aborted": None, "attempt": 1, "ended_at": "now"}
VIEWS = (
    OK | {"request_statuses": {"ok": 4}},
    OK | {"request_statuses": {"ok": 2, "timeout": 2}},
    OK | {"aborted": DEADLINE},
    OK | {"status": "failed", "reason": "it died"},
)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Four servers, one repeat, one cell each."""
    parsed, points = validate(tree() | {"repeats": 1}, write_project(tmp_path))
    built = plan.build(parsed, points, tmp_path, {("local", "reference"): "e" * 64})
    made = Project(parsed, built, Folders.below(tmp_path / "results"), tmp_path, {("local", "reference"): "e" * 64})
    for cell, view in zip(built.cells, VIEWS, strict=True):
        path = made.folders.results / cell.view
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(view))
    return made


def test_the_closing_lines_count_each_status_and_name_what_to_retry(project: Project) -> None:
    first, *lines = summary(project).splitlines()
    assert first == "cells: 2 ok, 1 aborted, 1 failed"
    paths = [project.folders.results / cell.view for cell in project.plan.cells]
    assert lines[:3] == [
        f"warning: 2 requests timed out in cell {paths[1]}",
        f"warning: cell broken off {paths[2]}: {DEADLINE}",
        f"warning: failed cell {paths[3]}: it died",
    ]
    assert lines[3].endswith("snakemake --config retry_failed=true")


def test_only_runs_with_something_to_retry_look_again(project: Project) -> None:
    methods = [run.server.name for run in runs_with_failures(project)]
    assert sorted(methods) == ["toy-ddtree-b4-k4", "toy-ddtree-b8-k8", "toy-dflash"]


@pytest.mark.parametrize(
    ("view", "state", "said"),
    [
        (VIEWS[0], "cached", "cached: attempt 1 of now"),
        (VIEWS[1], "cached", "cached: attempt 1 of now, 2 requests timed out"),
        (VIEWS[2], "aborted", f"cached as broken off: {DEADLINE}"),
        (VIEWS[3], "failed", "cached as failed: it died"),
    ],
)
def test_a_cell_in_the_store_is_explained(project: Project, view: dict[str, Any], state: str, said: str) -> None:
    status = CellStatus(project.plan.cells[0], Attempt(Path("x"), view, "0"))
    assert (status.state, _reason(status, [])) == (state, said)
