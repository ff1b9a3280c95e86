"""The lease on the client's machine: runs on different targets, and a training, never beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import plan
from ddtree_bench.client_machine import client_lease, training_lease
from ddtree_bench.config import validate
from ddtree_bench.project import Folders, Project
from ddtree_bench.targets.lease import TargetBusy


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A plan on this machine and on two external endpoints, which share a folder of leases."""
    shared = {"lease_dir": str(tmp_path / "leases"), "lease_wait_s": 0.2}
    config: dict[str, Any] = tree()
    config["targets"]["local"] |= shared
    for port, name in enumerate(("here", "there"), 8001):
        url = f"http://127.0.0.1:{port}"
        config["targets"][name] = {"launcher": "external", "engine": "sglang", "url": url} | shared
    config["sweep"][0] |= {"target": ["local", "here", "there"], "method": "AR"}
    parsed, points = validate(config, write_project(tmp_path))
    built = plan.build(parsed, points, tmp_path, {("local", "reference"): "e" * 64})
    return Project(parsed, built, Folders.below(tmp_path / "results"), tmp_path, {("local", "reference"): "e" * 64})


@pytest.mark.parametrize("other", ["local", "here", "there"])
def test_runs_on_any_two_targets_wait_for_each_other(project: Project, other: str) -> None:
    said: list[str] = []
    with client_lease(project, "there", "run-there", said.append):
        with (
            pytest.raises(TargetBusy, match=r"client\.lease is held by .*run run-there.*lease_wait_s"),
            client_lease(project, other, "run-other", said.append),
        ):
            pass
        assert "waiting for the lease" in said[0] and "run-there" in said[0]
    with client_lease(project, other, "run-other", said.append):
        pass


def test_a_training_and_a_run_wait_for_each_other(project: Project) -> None:
    with (
        training_lease(project, "drafter_train", print),
        pytest.raises(TargetBusy, match="run drafter_train"),
        client_lease(project, "here", "run-here", print),
    ):
        pass
    with (
        client_lease(project, "here", "run-here", print),
        pytest.raises(TargetBusy, match="run run-here"),
        training_lease(project, "drafter_train", print),
    ):
        pass
