"""What the checks of targets say of this machine, of endpoints, and of facts that no machine here has."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench.commands import run_command
from ddtree_bench.project import Project, open_project
from ddtree_bench.target_checks import Finding, NotReady, check_target, check_targets, findings_table
from ddtree_bench.target_checks.facts import Facts
from ddtree_bench.target_checks.gpus import check_gpus, gpus_needed
from ddtree_bench.targets import lease

GPUS = (
    "0, GPU-aa, NVIDIA B300, 590.48.01, 270000, 5, Enabled, 1400.00, 1400.00",
    "1, GPU-bb, NVIDIA B300, 590.48.01, 270000, 5, Enabled, 1400.00, 1400.00",
)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A configuration with a lease folder of its own and a root that can be written."""
    changed = tree()
    changed["targets"]["local"] |= {"lease_dir": str(tmp_path / "leases"), "root": str(tmp_path / "deployed")}
    return changed


def opened(config: Mapping[str, Any], tmp_path: Path) -> Project:
    envs = tmp_path / "envs"
    if not envs.exists():
        envs.symlink_to(Path(__file__).parents[2] / "envs")
    return open_project(config, write_project(tmp_path), tmp_path / "results")


def on_sglang(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same on SGLang, with model folders that are there."""
    config["targets"]["local"] |= {"engine": "sglang", "sglang_build": "cpu"}
    for name, model in (("model", config["models"]["toy"]), ("drafter", config["models"]["toy"]["drafter"])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        model["paths"] = {"local": str(folder)}
    return config


def levels(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in findings}


def test_this_machine_is_ready(config: dict[str, Any], tmp_path: Path) -> None:
    project = opened(on_sglang(config, tmp_path), tmp_path)
    findings = check_targets(project, print)
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert {"tools", "room", "model", "lease"} <= levels(findings).keys()
    said: list[str] = []
    assert run_command("check_targets", project, said.append) == "1 targets are ready"
    assert str(tmp_path / "model") in said[0]
    assert not list((tmp_path / "deployed").iterdir()) and not (tmp_path / "leases").exists()


def test_every_problem_is_told_at_once(config: dict[str, Any], tmp_path: Path) -> None:
    config = on_sglang(config, tmp_path)
    (tmp_path / "drafter" / "config.json").unlink()
    config["models"]["toy"]["paths"]["local"] = str(tmp_path / "not there")
    (tmp_path / "file").write_text("")
    config["targets"]["local"]["root"] = str(tmp_path / "file" / "deployed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config["targets"]["local"]["port"] = port = listener.getsockname()[1]
        with pytest.raises(NotReady) as refused:
            check_target(opened(config, tmp_path), "local", print)
    said = str(refused.value)
    assert said.startswith("4 problems")
    assert f"models.toy.paths.local: there is nothing at {tmp_path / 'not there'}" in said
    assert "models.toy.drafter.paths.local" in said and "config.json" in said
    assert f"port: {port} is in use by process {os.getpid()}" in said and "targets.local.port" in said
    assert f"{tmp_path}/file/deployed: nothing can be written there" in said and "set `root`" in said


def test_the_table_shows_words_as_they_are() -> None:
    words = "[127.0.0.1]:22 shows [bold]a key[/bold] in /a [b]/c"
    assert words in findings_table([Finding("gpubox", "reachable", "problem", words)])


def test_a_lease_that_is_held_is_a_note_for_who_waits_and_a_problem_for_who_does_not(
    config: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []
    with lease.acquire("machine", tmp_path / "leases", run="the run of somebody"):
        check_target(opened(config, tmp_path), "local", said.append)
        assert "the run of somebody" in said[0] and "up to 600 s" in said[0]
        config["targets"]["local"]["lease_wait_s"] = 0.0
        with pytest.raises(NotReady, match=r"the run of somebody.*targets\.local\.lease_wait_s"):
            check_target(opened(config, tmp_path), "local", print)


def test_a_port_of_the_run_that_holds_the_lease_is_a_note(config: dict[str, Any], tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        lease.acquire("machine", tmp_path / "leases", run="theirs"),
    ):
        config["targets"]["local"]["port"] = listener.getsockname()[1]
        assert levels(check_targets(opened(config, tmp_path), print))["port"] == "note"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [("revision", "to be pinned", "commit of the files"), ("name", "to be named (27B)", "published name")],
)
def test_what_an_example_leaves_open_is_refused(
    config: dict[str, Any], tmp_path: Path, key: str, value: str, remedy: str
) -> None:
    on_sglang(config, tmp_path)["models"]["toy"]["drafter"][key] = value
    with pytest.raises(NotReady) as refused:
        check_target(opened(config, tmp_path), "local", print)
    said = str(refused.value)
    assert said.startswith("1 problem,") and f"models.toy.drafter.{key}: is {value!r}; set it to the {remedy}" in said


def test_an_endpoint_that_does_not_answer(tmp_path: Path) -> None:
    config = tree()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config["targets"]["local"] = {"launcher": "external", "engine": "other", "url": f"http://127.0.0.1:{port}"}
    config["sweep"][0] |= {"method": "AR"}
    with pytest.raises(NotReady, match=rf"1 problem.*\n.*targets\.local\.url: http://127.0.0.1:{port} does not answer"):
        check_target(opened(config, tmp_path), "local", print)


def gpu_findings(*lines: str, processes: Sequence[str] = (), needed: int = 2, busy: bool = False) -> dict[str, Finding]:
    facts = Facts({"gpu": lines, "gpu_process": processes}, 0.0)
    return {finding.what: finding for finding in check_gpus("b300", facts, needed, busy)}


def test_gpus_that_are_there_and_idle() -> None:
    found = gpu_findings(*GPUS)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["GPUs"].words == "2 x NVIDIA B300; the plan takes 2"


def test_too_few_gpus_and_none() -> None:
    assert "the plan takes 8; nvidia-smi names 2" in str(gpu_findings(*GPUS, needed=8)["GPUs"])
    assert "there is no nvidia-smi; install NVIDIA's driver" in str(gpu_findings(needed=8)["GPUs"])
    failed = Facts({"gpu_error": ["status 9: no driver"]}, 0.0)
    assert "nvidia-smi says: status 9: no driver" in str(*check_gpus("b300", failed, 1, False))
    assert gpu_findings(needed=0) == {}


@pytest.mark.parametrize(("needed", "busy", "level"), [(2, False, "problem"), (1, False, "note"), (2, True, "note")])
def test_whoever_computes_on_a_gpu_is_named(needed: int, busy: bool, level: str) -> None:
    found = gpu_findings(*GPUS, processes=["GPU-bb, 4711, python"], needed=needed, busy=busy)["GPUs idle"]
    assert (found.level, "GPU 1 (process 4711 (python))" in found.words) == (level, True)


def test_memory_that_is_taken_unseen() -> None:
    taken = GPUS[0].replace(" 5,", " 40960,")
    found = gpu_findings(taken, GPUS[1])["GPUs idle"]
    assert found.level == "problem" and "40960 MiB taken by a process that this user cannot see" in found.words


def test_settings_that_change_numbers_are_noted() -> None:
    changed = GPUS[1].replace("Enabled, 1400.00", "Disabled, 900.00")
    said = str(gpu_findings(GPUS[0], changed)["GPU settings"])
    assert "GPU 1 900.00 W, not 1400.00 W" in said


def test_what_servers_take(config: dict[str, Any], tmp_path: Path) -> None:
    config["sweep"][0] |= {"tensor_parallel": [2, 4], "flags": {"pp-size": 2}, "method": ["AR"]}
    del config["sweep"][0]["budget"]
    config["targets"]["local"] |= {"engine": "sglang"}
    config["models"]["toy"]["paths"] = {"local": "/models/toy"}
    project = opened(config, tmp_path)
    spec = project.config.targets["local"]
    assert gpus_needed(spec, project.plan.servers) == 8
    assert gpus_needed(spec.model_copy(update={"sglang_build": "cpu"}), project.plan.servers) == 0
