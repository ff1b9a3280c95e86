"""The environment's key: content of pins, patches and source, and nothing else."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from ddtree_bench.environments import Environment, EnvironmentFailed, environment_key, manifest, python_tag
from ddtree_bench.environments.build import build, pinned
from ddtree_bench.environments.manifest import Manifest
from ddtree_bench.environments.recipes import (
    RECIPES,
    build_named,
    environment_name,
    environment_of,
    wheels_tag,
)
from ddtree_bench.environments.variables import engine_variables

REFERENCE = Environment("reference")
CPU, CUDA13 = Environment("sglang", "cpu"), Environment("sglang", "cuda13")
ADOPTED, ADOPTED_CPU = Environment("sglang", "adopted"), Environment("sglang", "adopted-cpu")


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    package = tmp_path / "reference" / "ddtree_reference"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    (package / "tree.py").write_text("y = 2\n")
    folder = tmp_path / "reference"
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / "requirements.lock").write_text("numpy==1 \\\n    --hash=sha256:0\n")
    (folder / "torch.in").write_text("torch==2\n")
    for name in ("plugin/pyproject.toml", "plugin/sglang_ddtree/tree.py", "cpu_platform/sglang_cpu_platform/dtypes.py"):
        (tmp_path / "sglang" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sglang" / name).write_text("x = 1\n")
    for name in ("cpu.lock", "cpu-torch.in", "cuda13.lock", "cpu.in"):
        (tmp_path / "sglang" / name).write_text("sglang==1\n")
    return tmp_path


def key(engines: Path, environment: Environment = REFERENCE) -> str:
    return environment_key(environment, engines)


def test_it_is_a_digest_and_the_same_in_another_place(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("clone")
    before = key(engines)
    (engines / "reference").rename(elsewhere / "reference")
    assert len(before) == 64 and key(elsewhere) == before


@pytest.mark.parametrize(
    "file", ["requirements.lock", "torch.in", "pyproject.toml", "ddtree_reference/tree.py", "patches/0001.patch"]
)
def test_content_changes_it(engines: Path, file: str) -> None:
    before = key(engines)
    path = engines / "reference" / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write("# one more line\n")
    assert key(engines) != before


def test_a_renamed_module_changes_it(engines: Path) -> None:
    before = key(engines)
    package = engines / "reference" / "ddtree_reference"
    (package / "tree.py").rename(package / "trees.py")
    assert key(engines) != before


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        "requirements.in",
        "training/pyproject.toml",
        "training/ddtree_training/train.py",
        "training/prompts/code.toml",
        "ddtree_reference/README.md",
        "ddtree_reference/__pycache__/tree.cpython-311.pyc",
        "ddtree_reference/.tree.py.swp",
        "ddtree_reference.egg-info/PKG-INFO",
    ],
)
def test_documentation_caches_and_training_do_not(engines: Path, file: str) -> None:
    before = key(engines)
    path = engines / "reference" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text\n")
    assert key(engines) == before


def test_the_engines_wheel_is_made_of_what_the_key_is_made_of_without_training() -> None:
    engine = Path(__file__).parents[2] / "envs" / "reference"
    options = tomllib.loads((engine / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_namespace_packages(str(engine), include=options["include"])
    assert packages and {package.split(".")[0] for package in packages} == {"ddtree_reference"}
    assert (engine / "training" / "ddtree_training").is_dir() and "training" not in RECIPES[REFERENCE].sources


def test_times_do_not(engines: Path) -> None:
    before = key(engines)
    for path in (engines / "reference").rglob("*"):
        os.utime(path, (0, 0))
    assert key(engines) == before


def test_engines_have_keys_of_their_own_and_unknown_ones_an_error(engines: Path) -> None:
    assert len({key(engines, environment) for environment in RECIPES}) == len(RECIPES)
    with pytest.raises(EnvironmentFailed, match="'vllm' does not exist; engines: reference, sglang"):
        key(engines, Environment("vllm"))
    with pytest.raises(EnvironmentFailed, match="has no build 'rocm'; builds: cpu, cuda13, adopted, adopted-cpu"):
        key(engines, Environment("sglang", "rocm"))


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("cpu.lock", {CPU}),
        ("cpu-torch.in", {CPU}),
        ("cuda13.lock", {CUDA13}),
        ("cpu.in", set()),
        ("plugin/sglang_ddtree/tree.py", {CPU, CUDA13, ADOPTED, ADOPTED_CPU}),
        ("plugin/tests/test_tree.py", set()),
        ("plugin/README.md", set()),
        ("cpu_platform/sglang_cpu_platform/dtypes.py", {CPU, ADOPTED_CPU}),
        ("patches/0001-a.patch", {CPU, CUDA13, ADOPTED, ADOPTED_CPU}),
        ("patches/README.md", set()),
        ("micro_models/train.py", set()),
    ],
)
def test_each_build_depends_on_its_own_files(engines: Path, file: str, changed: set[Environment]) -> None:
    builds = {CPU, CUDA13, ADOPTED, ADOPTED_CPU}
    before = {build: key(engines, build) for build in builds}
    path = engines / "sglang" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write("# one more line\n")
    assert {build for build in builds if key(engines, build) != before[build]} == changed


@pytest.mark.parametrize("environment", list(RECIPES))
def test_the_name_of_an_environment_tells_its_build(environment: Environment) -> None:
    name = environment_name(environment, "0123456789abcdef", wheels_tag(environment))
    engine, _, rest = name.partition("-")
    assert (engine, build_named(rest)) == environment
    assert "0123456789ab-" in name and name.endswith(("-py3", f"-{python_tag()}"))


def test_what_a_target_asks_for_is_the_environment() -> None:
    assert environment_of("reference", "cuda13", adopted=True) == REFERENCE
    assert environment_of("sglang", "cpu", adopted=False) == CPU
    assert environment_of("sglang", "cuda13", adopted=True) == ADOPTED
    assert environment_of("sglang", "cpu", adopted=True) == ADOPTED_CPU


def test_servers_on_a_cpu_get_the_interpreter_adopted_or_not() -> None:
    assert engine_variables(*CPU)["TRITON_INTERPRET"] == "1"
    assert engine_variables(*ADOPTED_CPU) == engine_variables(*CPU)
    assert engine_variables(*CUDA13) == engine_variables(*REFERENCE) == {}


def test_the_files_of_every_build_are_there() -> None:
    engines = Path(__file__).parents[2] / "envs"
    for environment, recipe in RECIPES.items():
        for name in (*recipe.pins, *recipe.sources, *(f"{project}/pyproject.toml" for project in recipe.projects)):
            assert (engines / environment.engine / name).exists(), f"{environment}: {name}"


def test_pins_of_a_lock() -> None:
    lock = Path(__file__).parents[2] / "envs" / "reference" / "requirements.lock"
    pins = pinned(lock)
    assert any(pin.startswith("numpy==") and "python_full_version" in pin for pin in pins)
    assert not any("--hash" in pin or "\\" in pin for pin in pins)


def test_building_without_a_lock_names_the_file(engines: Path, tmp_path: Path) -> None:
    (engines / "reference" / "requirements.lock").unlink()
    with pytest.raises(EnvironmentFailed, match=r"reference/requirements\.lock: is missing"):
        build(REFERENCE, engines, tmp_path / "wheelhouse")


def test_a_package_that_cannot_be_had_is_named_with_the_remedy(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    said: list[str] = []
    with pytest.raises(EnvironmentFailed, match=r"requirements\.lock: .*numpy==1.*\n.*PIP_FIND_LINKS"):
        build(REFERENCE, engines, tmp_path / "wheelhouse", report=said.append)
    assert any("numpy" in line for line in said)
    assert not (tmp_path / "wheelhouse" / "manifest.json").exists()


def test_a_build_whose_wheels_do_not_exist_for_this_python_says_which_do(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree_bench.environments.build.python_tag", lambda: "cp313")
    with pytest.raises(EnvironmentFailed, match=r"sglang \(cuda13\): .* exist for cp313; .*of cp311, cp312"):
        build(CUDA13, engines, tmp_path / "wheelhouse")


def test_a_build_whose_wheels_do_not_exist_for_this_platform_says_which_do(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engines / "sglang" / "cpu_platform" / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-aarch64")
    with pytest.raises(EnvironmentFailed, match=r"sglang \(cpu\): its wheels are for linux-x86_64, .* linux-aarch64;"):
        build(CPU, engines, tmp_path / "wheelhouse")


def test_the_manifest_of_an_engine_with_one_build_is_as_before_there_were_builds(tmp_path: Path) -> None:
    written = Manifest("reference", "k", "cp311", "linux-x86_64", (), {}, {}).write(tmp_path)
    assert "build" not in json.loads(written.read_text()) and manifest.read(tmp_path).environment == REFERENCE
    Manifest("sglang", "k", "cp311", "linux-x86_64", (), {}, {}, build="cpu").write(tmp_path)
    assert manifest.read(tmp_path).environment == CPU


def test_an_installation_that_is_there_cannot_be_adopted_where_a_patch_is_needed(engines: Path, tmp_path: Path) -> None:
    patch = engines / "sglang" / "patches" / "0001-a.patch"
    patch.parent.mkdir()
    patch.write_text("")
    with pytest.raises(EnvironmentFailed, match=r"0001-a\.patch: .*take `adopt` out of the target"):
        build(ADOPTED, engines, tmp_path / "wheelhouse")
