"""The archive of the package for hosts: equal everywhere, and all that a bare Python needs there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddtree_bench.targets import host_tools

ON_HOSTS = ("lease_keeper", "host_agent", "host_facts", "service_manager", "unit_state", "proc", "telemetry")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host_tools.archive(tmp_path_factory.mktemp("tools"))


def test_equal_packages_make_equal_archives(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_tools.NAME.fullmatch(archive.name)
    copy = tmp_path / "elsewhere" / "ddtree_bench"
    with zipfile.ZipFile(archive) as file:
        file.extractall(copy.parent)
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "cli.cpython-39.pyc").write_bytes(b"bytecode")
    os.utime(copy / "cli.py", (0, 0))
    monkeypatch.setattr(host_tools, "PACKAGE", copy)
    again = host_tools.archive(tmp_path / "tools")
    assert again.name == archive.name and again.read_bytes() == archive.read_bytes()
    (copy / "cli.py").write_text("")
    assert host_tools.archive(tmp_path / "tools").name != archive.name


def test_an_archive_that_is_there_is_left_alone(tmp_path: Path) -> None:
    first = host_tools.archive(tmp_path)
    written = first.stat()
    assert host_tools.archive(tmp_path) == first and first.stat() == written
    assert list(tmp_path.iterdir()) == [first]


def test_it_holds_modules_and_data(archive: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        names = file.namelist()
    assert names == sorted(names) and not any("__pycache__" in name for name in names)
    assert {"ddtree_bench/__init__.py", "ddtree_bench/targets/lease.py", "ddtree_bench/load/cell.py"} <= set(names)
    assert any(name.endswith(".html.j2") for name in names)


@pytest.mark.parametrize("module", [name for name in ON_HOSTS if find_spec(f"ddtree_bench.targets.{name}")])
def test_what_runs_on_hosts_needs_a_bare_python_alone(archive: Path, module: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, sys.argv[1]); import ddtree_bench.targets.{module} as m; print(m.__file__)"
    )
    argv = [sys.executable, "-I", "-S", "-c", program, str(archive)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.stdout.startswith(str(archive)), result.stderr


def test_the_command_imports_nothing_of_the_folder_it_is_started_in(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    argv, env = host_tools.command(sys.executable, str(archive), "ddtree_bench.targets.host_agent")
    result = subprocess.run(
        argv, env=env, cwd=tmp_path, input='{"op": "ping"}\n', capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 0 and "monotonic" in result.stdout, result.stderr


def test_arguments_go_to_the_module(archive: Path) -> None:
    argv, env = host_tools.command(sys.executable, str(archive), "ddtree_bench.targets.lease_keeper", "--help")
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0 and "--ttl" in result.stdout
