"""The lease on the client's machine: what needs it alone, what shares it, and what takes nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench import plan
from ddtree_bench.client_machine import LIMIT, client_lease, client_units, training_lease
from ddtree_bench.config import validate
from ddtree_bench.project import Folders, Project
from ddtree_bench.targets import lease
from ddtree_bench.targets.lease import TargetBusy


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A plan on this machine, two external endpoints and three hosts over SSH, which share a folder of leases here."""
    monkeypatch.setattr(lease, "DEFAULT_DIRECTORY", tmp_path / "leases")
    shared = {"lease_dir": str(tmp_path / "leases"), "lease_wait_s": 0.2}
    config: dict[str, Any] = tree()
    config["targets"]["local"] |= shared
    for port, name in enumerate(("here", "there"), 8001):
        url = f"http://127.0.0.1:{port}"
        config["targets"][name] = {"launcher": "external", "engine": "sglang", "url": url} | shared
    for name, client in (("gpu1", "here"), ("gpu2", "here"), ("gpu3", "target")):
        ssh = {"launcher": "ssh", "engine": "reference", "ssh_host": name, "scope": "user", "client": client}
        config["targets"][name] = ssh | shared
        config["targets"][name]["lease_dir"] = "/a/folder/of/the/host"
    config["sweep"][0] |= {"target": list(config["targets"]), "method": "AR"}
    parsed, points = validate(config, write_project(tmp_path))
    keys = {(target, "reference"): "e" * 64 for target in config["targets"] if target not in ("here", "there")}
    built = plan.build(parsed, points, tmp_path, keys)
    return Project(parsed, built, Folders.below(tmp_path / "results"), tmp_path, keys)


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


def test_runs_whose_servers_are_elsewhere_share_the_machine(project: Project) -> None:
    with (
        client_lease(project, "gpu1", "run-1", print),
        client_lease(project, "gpu2", "run-2", print),
        client_lease(project, "gpu3", "run-3", print),
    ):
        for alone in ("local", "there"):
            with (
                pytest.raises(TargetBusy, match=r"client\.lease is held by .*run run-(1|2)"),
                client_lease(project, alone, "run-alone", print),
            ):
                pass
        with pytest.raises(TargetBusy, match=r"run run-(1|2)"), training_lease(project, "drafter_train", print):
            pass


@pytest.mark.parametrize("target", ["gpu1", "gpu2"])
def test_they_wait_for_what_has_it_alone(project: Project, target: str) -> None:
    with (
        client_lease(project, "local", "run-local", print),
        pytest.raises(TargetBusy, match="run run-local"),
        client_lease(project, target, "run-there", print),
    ):
        pass


def test_a_client_on_its_target_waits_for_nobody_and_keeps_nobody_out(project: Project) -> None:
    with client_lease(project, "gpu3", "run-3", print), client_lease(project, "local", "run-local", print):
        pass
    with client_lease(project, "local", "run-local", print), client_lease(project, "gpu3", "run-3", print):
        pass


def test_the_units_of_the_resource_go_with_the_lease(project: Project) -> None:
    units = {name: client_units(target) for name, target in project.config.targets.items()}
    assert units == {"local": LIMIT, "here": LIMIT, "there": LIMIT, "gpu1": 1, "gpu2": 1, "gpu3": 0}
    assert LIMIT > 1
