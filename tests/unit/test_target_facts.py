"""The program that asks a target what it has, run by the real shell of this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddtree_bench.target_checks import facts as check_facts
from ddtree_bench.target_checks.facts import Facts
from ddtree_bench.targets import lease
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.local import LocalLauncher

SMI = """#!/bin/sh
case $1 in
--query-gpu=*)
    echo "0, GPU-aa, NVIDIA RTX PRO 6000, 590.48.01, 97887, 5, Enabled, 600.00, 600.00"
    echo "1, GPU-bb, NVIDIA RTX PRO 6000, 590.48.01, 97887, 40960, Disabled, 450.00, 600.00" ;;
--query-compute-apps=*) echo "GPU-bb, 4711, python, serve.py" ;;
esac
"""

LISTENER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    input()
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for programs first."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def ask(tmp_path: Path, **values: Any) -> Facts:
    wanted: dict[str, Any] = {"port": 0, "address": "127.0.0.1", "lease": "/nowhere", "paths": []}
    return check_facts.ask(LocalLauncher(tmp_path / "leases", "test"), **{**wanted, **values})


def write_smi(folder: Path, text: str) -> None:
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)


def test_whoever_listens_on_the_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"process {os.getpid()} (" in (ask(tmp_path, port=port).one("port_holder") or "")
        assert ask(tmp_path, port=port, address="127.0.0.2").one("port_holder") is None
    assert ask(tmp_path, port=port).one("port_holder") is None


@pytest.mark.parametrize("everywhere", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_is_taken_at_every_address(tmp_path: Path, everywhere: socket.AddressFamily) -> None:
    with socket.create_server(("", 0), family=everywhere) as listener:
        assert ask(tmp_path, port=listener.getsockname()[1]).one("port_holder") is not None


def test_a_command_line_of_several_lines_is_no_fact(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", LISTENER, "\npath there\nend"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        facts = ask(tmp_path, port=int(process.stdout.readline()))
        process.communicate("\n")
    assert f"process {process.pid} (" in (facts.one("port_holder") or "")
    assert facts.all("path") == ()


def test_a_lease_that_is_held_tells_its_content(tmp_path: Path) -> None:
    path = lease.path_of("machine", tmp_path)
    assert ask(tmp_path, lease=str(path)).one("lease_holder") is None
    with lease.acquire("machine", tmp_path, run="the run of somebody"):
        assert json.loads(ask(tmp_path, lease=str(path)).one("lease_holder") or "")["run"] == "the run of somebody"
    assert path.exists()
    assert ask(tmp_path, lease=str(path)).one("lease_holder") is None


def test_paths_are_told_apart_and_nothing_in_them_runs(tmp_path: Path) -> None:
    model = tmp_path / "a model $(touch injected) `touch injected`; touch injected"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    facts = ask(
        tmp_path, paths=[str(model), str(tmp_path / "empty"), str(model / "config.json"), str(tmp_path / "none")]
    )
    assert facts.all("path") == ["there", "unconfigured", "there", "missing"]
    assert not Path("injected").exists()


def test_gpus_and_who_computes_on_them(tmp_path: Path, path: Path) -> None:
    write_smi(path, SMI)
    facts = ask(tmp_path)
    assert [(gpu["index"], gpu["driver"], gpu["persistence"]) for gpu in facts.gpus] == [
        ("0", "590.48.01", "Enabled"),
        ("1", "590.48.01", "Disabled"),
    ]
    assert facts.gpu_processes == [("GPU-bb", "process 4711 (python, serve.py)")]


def test_a_driver_that_does_not_answer(tmp_path: Path, path: Path) -> None:
    write_smi(path, "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not reach the driver.'\nexit 9\n")
    facts = ask(tmp_path)
    assert facts.gpus == []
    assert facts.one("gpu_error") == "status 9: NVIDIA-SMI has failed because it could not reach the driver."


def test_a_driver_that_hangs_does_not_hang_the_checks(tmp_path: Path, path: Path) -> None:
    write_smi(path, "#!/bin/sh\nexec sleep 60\n")
    began = time.monotonic()
    assert "status 124" in (ask(tmp_path).one("gpu_error") or "")
    assert time.monotonic() - began < 12


def test_commands_that_are_not_there_are_named(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sh", "awk", "cat", "cut", "date", "dirname", "head", "uname", "stat", "env", "find"):
        (path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(path))
    lease_file = tmp_path / "machine.lease"
    lease_file.write_text("{}")
    facts = ask(tmp_path, lease=str(lease_file))
    assert "flock" in facts.all("tool_missing")
    assert facts.one("lease_holder") is None


def test_a_shell_that_says_something_else_is_no_answer(tmp_path: Path, path: Path) -> None:
    (path / "sh").write_text(f"#!{shutil.which('sh')}\necho 'this account is not available' >&2; exit 1\n")
    (path / "sh").chmod(0o755)
    with pytest.raises(TargetError, match="this account is not available"):
        ask(tmp_path)


def test_the_clock_is_held_against_ours(tmp_path: Path) -> None:
    assert abs(ask(tmp_path).clock_ahead_s) < 2
