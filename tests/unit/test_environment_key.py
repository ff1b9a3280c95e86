"""The environment's key: content of pins, patches and source, and nothing else."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from ddtree_bench.environments import EnvironmentFailed, environment_key
from ddtree_bench.environments.build import build, pinned
from ddtree_bench.environments.key import SOURCES


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
    return tmp_path


def key(engines: Path) -> str:
    return environment_key("reference", engines)


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
    assert (engine / "training" / "ddtree_training").is_dir() and "training" not in SOURCES["reference"]


def test_times_do_not(engines: Path) -> None:
    before = key(engines)
    for path in (engines / "reference").rglob("*"):
        os.utime(path, (0, 0))
    assert key(engines) == before


def test_engines_have_keys_of_their_own_and_unknown_ones_an_error(engines: Path) -> None:
    assert environment_key("sglang", engines) != key(engines)
    with pytest.raises(EnvironmentFailed, match="'vllm' does not exist; engines: reference, sglang"):
        environment_key("vllm", engines)


def test_pins_of_a_lock() -> None:
    lock = Path(__file__).parents[2] / "envs" / "reference" / "requirements.lock"
    pins = pinned(lock)
    assert any(pin.startswith("numpy==") and "python_full_version" in pin for pin in pins)
    assert not any("--hash" in pin or "\\" in pin for pin in pins)


def test_building_without_a_lock_names_the_file(engines: Path, tmp_path: Path) -> None:
    (engines / "reference" / "requirements.lock").unlink()
    with pytest.raises(EnvironmentFailed, match=r"reference/requirements\.lock: is missing"):
        build("reference", engines, tmp_path / "wheelhouse")


def test_a_package_that_cannot_be_had_is_named_with_the_remedy(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    said: list[str] = []
    with pytest.raises(EnvironmentFailed, match=r"requirements\.lock: .*numpy==1.*\n.*PIP_FIND_LINKS"):
        build("reference", engines, tmp_path / "wheelhouse", report=said.append)
    assert any("numpy" in line for line in said)
    assert not (tmp_path / "wheelhouse" / "manifest.json").exists()
