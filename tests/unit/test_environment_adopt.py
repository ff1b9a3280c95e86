"""An SGLang that is installed already is used as it is: checked, seen by a folder of our own, never written to."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench.deployment import confirm_deployment
from ddtree_bench.environments import Environment, EnvironmentFailed, installer
from ddtree_bench.environments.build import build
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.hosts import read_host, record_host, server_host_key
from ddtree_bench.launchers import target_launcher
from ddtree_bench.project import Project, open_project
from ddtree_bench.records.files import write_json
from ddtree_bench.targets.local import LocalLauncher, own_tools
from ddtree_bench.targets.probe import HostChanged

ADOPTED, ADOPTED_CPU = Environment("sglang", "adopted"), Environment("sglang", "adopted-cpu")
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

PLATFORM = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang-cpu-platform"
version = "0.1"
""",
    "sglang_cpu_platform/__init__.py": "",
    "sglang_cpu_platform/activation.py": "raise ImportError('no such kernel')\n",
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
        # As of an editable installation: a module that each start of their interpreter imports.
        self.write("their_finder.py", "FINDER = 1\n")
        self.write("__editable__.pth", "import their_finder\n")

    def write(self, name: str, text: str) -> None:
        path = self.site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def has_version(self, name: str, version: str) -> None:
        self.write(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def content(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository") / "envs"
    write_files(folder / "sglang" / "plugin", PLUGIN)
    write_files(folder / "sglang" / "cpu_platform", PLATFORM)
    return folder


@pytest.fixture(scope="module")
def wheelhouse(engines: Path) -> Path:
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
    assert adopted["installation"].startswith(
        f"SGLang 0.5.23, torch 2.14.1, Python {platform.python_version()}, 3 distributions, versions "
    )
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
    installation.write("sglang/srt/other.py", "OTHER = 1\n")
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


@pytest.mark.parametrize("file", ["sglang/srt/other.py", "sglang/kernels/attention.cuh"])
def test_a_changed_file_that_is_not_hooked_makes_another_installation(
    wheelhouse: Path, tmp_path: Path, installation: Installation, file: str
) -> None:
    before = adopt(wheelhouse, tmp_path, installation.folder)
    installation.write(file, "changed\n")
    after = adopt(wheelhouse, tmp_path, installation.folder)
    assert after["versions"] == before["versions"]
    assert after["adopted"]["installation"] != before["adopted"]["installation"]


def test_the_programs_of_the_installation_are_found_after_our_own(
    wheelhouse: Path, tmp_path: Path, installation: Installation
) -> None:
    receipt = adopt(wheelhouse, tmp_path, installation.folder)
    ours, theirs = Path(receipt["python"]).parent, installation.folder / "bin"
    found = own_tools(receipt["python"], {"PATH": "/usr/bin"})["PATH"]
    assert found == os.pathsep.join((str(ours), str(theirs), "/usr/bin"))
    known = f"/usr/bin{os.pathsep}{theirs}"
    assert own_tools(receipt["python"], {"PATH": known})["PATH"] == os.pathsep.join((str(ours), known))


def test_a_home_folder_can_be_named_by_its_sign(
    wheelhouse: Path, tmp_path: Path, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    receipt = adopt(wheelhouse, tmp_path, Path("~/theirs"))
    assert receipt["adopted"]["folder"] == str(installation.site_packages)


def test_the_platform_for_cpus_is_imported_before_it_is_used(
    engines: Path, tmp_path: Path, installation: Installation
) -> None:
    wheelhouse = tmp_path / "wheelhouse"
    build(ADOPTED_CPU, engines, wheelhouse)
    said = refusal(wheelhouse, tmp_path, installation.folder)
    assert "importing sglang_cpu_platform.activation" in said and "no such kernel" in said


def test_an_environment_stays_until_the_new_one_is_complete(
    wheelhouse: Path, tmp_path: Path, installation: Installation
) -> None:
    folder = Path(adopt(wheelhouse, tmp_path, installation.folder)["folder"])
    (folder / "in-use").write_text("")
    installation.write("torch/__init__.py", "raise ImportError('half upgraded')\n")
    installation.has_version("torch", "2.15")
    assert "half upgraded" in refusal(wheelhouse, tmp_path, installation.folder)
    assert (folder / "in-use").exists()
    installation.write("torch/__init__.py", "")
    receipt = adopt(wheelhouse, tmp_path, installation.folder)
    assert receipt["folder"] == str(folder) and not (folder / "in-use").exists()
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    # Nothing in it names the folder in which it was made.
    written = [
        path
        for path in (*(folder / "bin").iterdir(), *folder.rglob("*.pth"), folder / "pyvenv.cfg")
        if not path.is_symlink()
    ]
    assert written and not any(b".partial" in path.read_bytes() for path in written)
    assert str(folder) in (folder / "bin" / "activate").read_text()


def test_scripts_run_from_the_place_that_an_environment_is_moved_to(tmp_path: Path) -> None:
    made, folder = tmp_path / "env.partial", tmp_path / "env"
    write_files(made, {"bin/tool": f"#!{made}/bin/python\n", "pyvenv.cfg": f"command = {made}\n"})
    (made / "bin" / "program").write_bytes(b"\0" + str(made).encode())
    write_files(folder, {"bin/old": ""})
    installer.move_into_place(made, folder)
    assert (folder / "bin" / "tool").read_text() == f"#!{folder}/bin/python\n"
    assert (folder / "bin" / "program").read_bytes() == b"\0" + str(made).encode()
    assert [path.name for path in tmp_path.iterdir()] == ["env"] and not (folder / "bin" / "old").exists()


@pytest.fixture
def opened(engines: Path, tmp_path: Path) -> Callable[[Path], Project]:
    """Opens a project whose target adopts an installation, with everything of it below the test's folder."""
    (tmp_path / "envs").symlink_to(engines)
    write_project(tmp_path)
    for name in ("toy", "drafter"):
        write_files(tmp_path / name, {"config.json": "{}", "model.safetensors": name})

    def project(path: Path) -> Project:
        config = tree()
        config["targets"]["local"] |= {"engine": "sglang", "adopt": str(path), "lease_dir": str(tmp_path / "leases")}
        config["models"]["toy"]["paths"] = {"local": str(tmp_path / "toy")}
        config["models"]["toy"]["drafter"]["paths"] = {"local": str(tmp_path / "drafter")}
        return open_project(config, tmp_path, tmp_path / "results")

    return project


def deployed(project: Project) -> dict[str, Any]:
    """Deploy as the rule does, which writes the receipt."""
    receipt = confirm_deployment(project, target_launcher(project, "local"), "local", "sglang", print)
    write_json(project.receipt("local", "sglang"), receipt)
    return receipt


def keys_of(project: Project) -> set[str]:
    return {server_host_key(read_host(project, "local"), server) for server in project.plan.servers}


def test_an_upgrade_stops_the_run_until_it_is_accepted(
    opened: Callable[[Path], Project], installation: Installation
) -> None:
    project = opened(installation.folder)
    deployed(project)
    record_host(project, "local", print)
    before = keys_of(project)
    installation.has_version("torch", "2.15")
    with pytest.raises(HostChanged, match=r"adopted installation of sglang: was .*2\.14\.1.*, is .*2\.15"):
        record_host(project, "local", print)
    record_host(project, "local", print, accept=True)
    now = confirm_deployment(project, target_launcher(project, "local"), "local", "sglang", print)
    assert read_host(project, "local")["adopted"] == {"sglang": now["adopted"]["installation"]}
    assert not before & keys_of(project)


def test_a_receipt_becomes_that_of_what_was_deployed_anew_and_keeps_its_time(
    opened: Callable[[Path], Project], installation: Installation
) -> None:
    project = opened(installation.folder)
    deployed(project)
    path = project.receipt("local", "sglang")
    os.utime(path, (1, 1))
    installation.has_version("torch", "2.15")
    now = confirm_deployment(project, target_launcher(project, "local"), "local", "sglang", print)
    assert json.loads(path.read_text()) == now and now["versions"]["torch"] == "2.15"
    assert path.stat().st_mtime == 1


def test_another_installation_has_a_receipt_of_its_own_and_is_to_be_accepted(
    opened: Callable[[Path], Project], tmp_path: Path, installation: Installation
) -> None:
    other = Installation(tmp_path / "others")
    other.has_version("torch", "2.15")
    first, second = opened(installation.folder), opened(other.folder)
    assert first.receipt("local", "sglang") != second.receipt("local", "sglang")
    assert first.endpoint_keys("local") != second.endpoint_keys("local")
    assert {cell.key for cell in first.plan.cells} == {cell.key for cell in second.plan.cells}
    deployed(first)
    record_host(first, "local", print)
    before = keys_of(first)
    deployed(second)
    with pytest.raises(HostChanged, match="adopted installation of sglang"):
        record_host(second, "local", print)
    record_host(second, "local", print, accept=True)
    assert not before & keys_of(second)
