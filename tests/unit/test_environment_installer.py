"""One installation of a folder at a time: who comes later waits, says so, and takes what the first one made."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_wheelhouse import write_wheelhouse

from ddtree_bench.environments import installer, manifest
from ddtree_bench.environments.deploy import deploy
from ddtree_bench.targets.local import LocalLauncher


def start(request: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, installer.__file__, json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def verify(folder: Path, *, wait: bool) -> dict[str, Any]:
    return {
        **dict.fromkeys(("engine", "build", "key", "python", "manifest_sha256"), "x"),
        **{"action": "verify", "wait": wait, "adopt": None, "folder": str(folder)},
    }


def test_another_installation_is_waited_for_with_its_process_named(tmp_path: Path) -> None:
    with (tmp_path / "env.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        waiting = start(verify(tmp_path / "env", wait=True))
        assert waiting.stdout is not None
        assert "another installation is going on, process 4711: waiting" in waiting.stdout.readline()
        # The lock's file is removed under the lock, as by `prune`: the one that is made next is another.
        (tmp_path / "env.lock").unlink()
    said, _ = waiting.communicate(timeout=20)
    assert said == "null\n" and (tmp_path / "env.lock").read_text() == f"{waiting.pid}\n"


def test_to_look_is_to_wait_for_nobody_and_to_write_nothing(tmp_path: Path) -> None:
    said, _ = start(verify(tmp_path / "nowhere" / "env", wait=False)).communicate(timeout=20)
    assert said == "null\n" and not list(tmp_path.iterdir())
    with (tmp_path / "env.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said, _ = start(verify(tmp_path / "env", wait=False)).communicate(timeout=20)
    assert said == "null\n"


@pytest.mark.slow
def test_a_receipt_tells_when_its_environment_was_used_last(tmp_path: Path) -> None:
    wheelhouse = write_wheelhouse(tmp_path / "wheelhouse", "a" * 64)
    launcher, root, said = LocalLauncher(tmp_path / "leases", "test"), str(tmp_path / "installed"), list[str]()
    receipt = deploy(launcher, wheelhouse, root, report=said.append)
    assert (manifest.wheels_folder(wheelhouse) / "torch-1-py3-none-any.whl").exists(), "they were not sent"
    written = Path(receipt["folder"]) / "receipt.json"
    os.utime(written, (1, 1))
    assert deploy(launcher, wheelhouse, root, report=said.append) == receipt
    assert "already deployed" in said[-1] and written.stat().st_mtime > 1
