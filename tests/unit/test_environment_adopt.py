"""An SGLang that is installed already is used as it is: checked, seen by a folder of our own, never written to."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree_bench.environments import Environment, EnvironmentFailed
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.targets.local import LocalLauncher

ADOPTED = Environment("sglang", "adopted")
HOOKED = "SEAM = 1\n"
LAUNCH_SERVER = """\
import importlib.metadata
for point in importlib.metadata.entry_points(group="sglang.srt.plugins"):
    point.load()()
"""
PLUGIN = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang-ddtree"
version = "0.1"
[project.entry-points."sglang.srt.plugins"]
ddtree = "sglang_ddtree:load"
[tool.setuptools.package-data]
sglang_ddtree = ["release.json"]
""",
    "sglang_ddtree/__init__.py": "def load():\n    print('--speculative-algorithm DDTREE')\n",
    "sglang_ddtree/release.json": json.dumps(
        {"release": "0.5.23", "files": {"sglang/srt/seam.py": hashlib.sha256(HOOKED.encode()).hexdigest()}}
    ),
}


class Installation:
    """A virtual environment with packages that stand in for SGLang's."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder = folder
        (self.site_packages,) = folder.glob("lib/python*/site-packages")
        self.write("sglang/__init__.py", "")
        self.write("sglang/launch_server.py", LAUNCH_SERVER)
        self.write("sglang/srt/seam.py", HOOKED)
        self.write("torch/__init__.py", "")
        self.has_version("sglang", "0.5.23")
        self.has_version("torch", "2.14.1")

    def write(self, name: str, text: str) -> None:
        path = self.site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def has_version(self, name: str, version: str) -> None:
        self.write(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def content(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engines = tmp_path_factory.mktemp("engines")
    for name, text in PLUGIN.items():
        path = engines / "sglang" / "plugin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = engines / "wheelhouse"
    build(ADOPTED, engines, folder)
    return folder


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "theirs")


def adopt(wheelhouse: Path, tmp_path: Path, path: Path, said: list[str] | None = None) -> dict[str, Any]:
    launcher = LocalLauncher(tmp_path / "leases", "test")
    report = (said if said is not None else []).append
    return deploy(launcher, wheelhouse, str(tmp_path / "installed"), adopt=str(path), report=report)


def refusal(wheelhouse: Path, tmp_path: Path, path: Path) -> str:
    with pytest.raises(EnvironmentFailed) as caught:
        adopt(wheelhouse, tmp_path, path)
    return str(caught.value)


def test_nothing_is_built_but_our_own_wheel(wheelhouse: Path) -> None:
    assert [path.name for path in (wheelhouse / "wheels").iterdir()] == ["sglang_ddtree-0.1-py3-none-any.whl"]


def test_it_is_seen_beside_the_plugin_and_left_as_it_is(
    wheelhouse: Path, tmp_path: Path, installation: Installation
) -> None:
    before, said = installation.content(), list[str]()
    receipt = adopt(wheelhouse, tmp_path, installation.folder, said)
    assert installation.content() == before
    assert receipt["versions"] == {"sglang": "0.5.23", "sglang-ddtree": "0.1", "torch": "2.14.1"}
    adopted = receipt["adopted"]
    assert (adopted["version"], adopted["files"], len(adopted["files_sha256"])) == ("0.5.23", 1, 64)
    assert adopted["path"] == str(installation.folder)
    assert adopted["installation"].startswith("SGLang 0.5.23, torch 2.14.1, 3 distributions, versions ")
    shown = subprocess.check_output([receipt["python"], "-m", "sglang.launch_server"], text=True)
    assert "DDTREE" in shown
    assert subprocess.check_output([installation.folder / "bin" / "python", "-m", "sglang.launch_server"]) == b""

    assert adopt(wheelhouse, tmp_path, installation.folder, said) == receipt
    assert "already deployed" in said[-1]


def test_an_interpreter_names_an_installation_too(wheelhouse: Path, tmp_path: Path, installation: Installation) -> None:
    receipt = adopt(wheelhouse, tmp_path, installation.folder / "bin" / "python")
    assert receipt["adopted"]["folder"] == str(installation.site_packages)


def test_two_installations_stand_side_by_side(wheelhouse: Path, tmp_path: Path, installation: Installation) -> None:
    other = Installation(tmp_path / "others")
    first, second = (adopt(wheelhouse, tmp_path, place.folder) for place in (installation, other))
    assert first["folder"] != second["folder"] and Path(first["folder"]).is_dir()


def test_another_release_is_refused(wheelhouse: Path, tmp_path: Path, installation: Installation) -> None:
    installation.has_version("sglang", "0.5.22")
    said = refusal(wheelhouse, tmp_path, installation.folder)
    assert f"adopt: {installation.folder}: has SGLang 0.5.22, but the DDTree plugin is made for 0.5.23" in said
    assert "install sglang==0.5.23 there" in said and not list((tmp_path / "installed").glob("*/"))


def test_a_changed_file_that_is_hooked_is_refused_by_name(
    wheelhouse: Path, tmp_path: Path, installation: Installation
) -> None:
    installation.write("sglang/srt/other.py", "changed, but of no concern\n")
    adopt(wheelhouse, tmp_path, installation.folder)
    # A deployment that is there does not hide a change made since.
    installation.write("sglang/srt/seam.py", "SEAM = 2\n")
    assert "sglang/srt/seam.py in " in refusal(wheelhouse, tmp_path, installation.folder)


def test_a_place_without_sglang_is_refused(wheelhouse: Path, tmp_path: Path, installation: Installation) -> None:
    (installation.site_packages / "sglang" / "__init__.py").unlink()
    assert "has no SGLang; install" in refusal(wheelhouse, tmp_path, installation.folder)
    missing = tmp_path / "nowhere"
    assert f"adopt: {missing}: {missing} is no Python that runs" in refusal(wheelhouse, tmp_path, missing)


def test_upgraded_packages_are_another_installation(
    wheelhouse: Path, tmp_path: Path, installation: Installation
) -> None:
    before = adopt(wheelhouse, tmp_path, installation.folder)
    installation.has_version("torch", "2.15")
    after = adopt(wheelhouse, tmp_path, installation.folder)
    assert after["versions"]["torch"] == "2.15"
    assert after["adopted"]["installation"] != before["adopted"]["installation"]
