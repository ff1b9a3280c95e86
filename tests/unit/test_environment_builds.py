"""What a target asks for: a build of SGLang, or one that is there; in the configuration and in the project's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench.config import ConfigError, validate
from ddtree_bench.environments import Environment
from ddtree_bench.project import Project, open_project
from ddtree_bench.targets.probe import check_unchanged, host_key

ENVS = Path(__file__).parents[2] / "envs"
RECORD: dict[str, Any] = {
    "gpus": [],
    "driver": None,
    "cpu": {"model": "x", "cores": 2},
    "models": {"toy": {"fingerprint": "f", "path": "/m"}},
}


def configuration(**target: Any) -> dict[str, Any]:
    config = tree()
    config["targets"]["local"] |= {"engine": "sglang", **target}
    config["models"]["toy"]["paths"] = {"local": "/models/toy"}
    config["models"]["toy"]["drafter"]["paths"] = {"local": "/models/drafter"}
    return config


def opened(folder: Path, **target: Any) -> Project:
    (folder / "envs").symlink_to(ENVS)
    return open_project(configuration(**target), write_project(folder))


def problem(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config, write_project(folder))
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("target", "build"),
    [
        ({}, "cuda13"),
        ({"sglang_build": "cpu"}, "cpu"),
        ({"adopt": "/opt/sglang"}, "adopted"),
        ({"adopt": "/opt/sglang", "sglang_build": "cpu"}, "adopted-cpu"),
    ],
)
def test_a_target_says_which_build_it_takes(tmp_path: Path, target: dict[str, str], build: str) -> None:
    project = opened(tmp_path, **target)
    assert project.environment("local", "sglang") == Environment("sglang", build)
    assert project.adopted("local", "sglang") == target.get("adopt")
    name = project.environment_name("local", "sglang")
    assert name.startswith(f"sglang-{build}-")
    assert project.manifest("local", "sglang").parent.name == name
    assert re.fullmatch(
        f"deployed-{name}" + ("-[0-9a-f]{6}" if "adopt" in target else "") + r"\.json",
        project.receipt("local", "sglang").name,
    )
    assert {server.environment for server in project.plan.servers} == {project.environment_keys["local", "sglang"]}


def test_builds_of_two_targets_have_keys_of_their_own(tmp_path: Path) -> None:
    config = configuration(sglang_build="cpu")
    config["targets"]["gpu"] = {"launcher": "local", "engine": "sglang"}
    config["models"]["toy"]["paths"]["gpu"] = config["models"]["toy"]["drafter"]["paths"]["gpu"] = "/m"
    config["sweep"][0]["target"] = ["local", "gpu"]
    (tmp_path / "envs").symlink_to(ENVS)
    project = open_project(config, write_project(tmp_path))
    keys = {server.target: server.environment for server in project.plan.servers}
    assert len(set(keys.values())) == 2 and set(keys) == {"local", "gpu"}


def test_where_it_is_adopted_from_is_no_part_of_a_cell(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    one, other = (opened(folder, adopt=path) for folder, path in zip(folders, ("/opt/a", "/opt/b"), strict=True))
    assert [cell.key for cell in one.plan.cells] == [cell.key for cell in other.plan.cells]


def test_what_was_adopted_is_part_of_the_host() -> None:
    old, new = ({**RECORD, "adopted": {"sglang": f"SGLang 0.5.23, torch {torch}"}} for torch in ("2.14.1", "2.15"))
    keys = {host_key(RECORD, "toy", None, record["adopted"]["sglang"]) for record in (old, new)}
    assert len(keys | {host_key(RECORD, "toy", None)}) == 3
    check_unchanged(old, {**new, "adopted": {}})
    with pytest.raises(Exception, match=r"adopted installation of sglang: was .*2\.14\.1, is .*2\.15"):
        check_unchanged(old, new)


def test_cuda_12_is_refused_with_the_seams_that_are_not_there(tmp_path: Path) -> None:
    said = problem(tmp_path, configuration(sglang_build="cuda12"))
    assert said.startswith("targets.local.sglang_build: 'cuda12': there is none with DDTree: SGLang 0.5.19")
    assert "arg_groups.fields" in said and "verify_tree_greedy_func" in said and "use cuda13" in said


@pytest.mark.parametrize(
    ("tag", "platform", "said"),
    [
        (
            "cp313",
            "linux-x86_64",
            "not all of its wheels exist for cp313; run the workflow with a Python of cp311, cp312",
        ),
        ("cp312", "linux-aarch64", "its wheels are for linux-x86_64, and this machine is linux-aarch64; run the"),
    ],
)
def test_a_build_that_cannot_be_had_here_is_refused_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, platform: str, said: str
) -> None:
    monkeypatch.setattr("ddtree_bench.config.checks.python_tag", lambda: tag)
    monkeypatch.setattr("ddtree_bench.config.checks.get_platform", lambda: platform)
    assert problem(tmp_path, configuration()).startswith(f"targets.local.sglang_build: 'cuda13': {said}")
    # Our own wheels alone run anywhere.
    validate(configuration(adopt="/opt/sglang"), write_project(tmp_path))


def test_nothing_is_adopted_where_a_patch_is_needed(tmp_path: Path) -> None:
    patches = tmp_path / "envs" / "sglang" / "patches"
    patches.mkdir(parents=True)
    (patches / "0001-a.patch").write_text("")
    said = problem(tmp_path, configuration(adopt="/opt/sglang"))
    assert said.startswith("targets.local.adopt: '/opt/sglang': ")
    assert "0001-a.patch; take `adopt` out" in said
    validate(configuration(), write_project(tmp_path))


@pytest.mark.parametrize("target", [{}, {"adopt": "/opt/sglang"}])
def test_what_a_build_sets_is_not_passed_on(tmp_path: Path, target: dict[str, str]) -> None:
    passed = {"pass_env": ["HF_TOKEN", "TRITON_INTERPRET"], **target}
    said = problem(tmp_path, configuration(sglang_build="cpu", **passed))
    assert said == "targets.local.pass_env: 'TRITON_INTERPRET' is set to 1 by sglang_build cpu; take it out"
    validate(configuration(**passed), write_project(tmp_path))


def test_nothing_is_adopted_where_no_sglang_runs(tmp_path: Path) -> None:
    config = tree()
    config["targets"]["local"]["adopt"] = "/opt/sglang"
    said = problem(tmp_path, config)
    assert said.startswith("targets.local.adopt: '/opt/sglang', but the sweep runs no SGLang there; take the key out")
    assert problem(tmp_path, configuration(adopt="")).startswith("targets.local.adopt: is empty; give an interpreter")


def test_an_endpoint_that_is_up_has_no_build(tmp_path: Path) -> None:
    config = configuration()
    config["targets"]["there"] = {
        "launcher": "external",
        "engine": "sglang",
        "url": "http://127.0.0.1:1",
        "sglang_build": "cpu",
    }
    assert problem(tmp_path, config).startswith("targets.there.sglang_build: is for servers that are started")
