"""One server of the reference engine in the foreground, from its start to its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreground import TREE
from processes import PATIENCE_S, alive, end

from ddtree_bench.servers import api

PROGRAM = str(Path(__file__).with_name("foreground.py"))


def foreground(folder: Path, **changes: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, str(folder), json.dumps(changes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def server_pid(folder: Path) -> int:
    return int(json.loads((folder / "server.state.json").read_text())["server_pid"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    with foreground(tmp_path) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert api.server_info(url)["speculative_num_draft_tokens"] == TREE.verify_width
            assert api.first_completion(url, "toy", timeout_s=60) >= 1
            process.send_signal(number)
            _, said = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0 and f"stopped, interrupted by {number.name}" in said
            assert not alive(server_pid(tmp_path))
        finally:
            end(process.pid)


def test_a_server_that_dies_ends_it_with_the_end_of_its_log(tmp_path: Path) -> None:
    with foreground(tmp_path) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("http://127.0.0.1:")
            end(server_pid(tmp_path))
            _, said = process.communicate(timeout=PATIENCE_S)
            last = (tmp_path / "server.log").read_text().splitlines()[-1]
            assert process.returncode == 1 and "ended by signal 9" in said and last in said
        finally:
            end(process.pid)


def test_a_launch_that_the_server_refuses_ends_it_with_the_reason(tmp_path: Path) -> None:
    with foreground(tmp_path, flags=[["no-such-option", "1"]]) as process:
        try:
            _, said = process.communicate(timeout=60)
            assert process.returncode == 1
            assert "exit status 2" in said and "unrecognized arguments: --no-such-option 1" in said
        finally:
            end(process.pid)


def test_a_fault_on_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_REFERENCE_FAULT", "DDTREE:8@start")
    with foreground(tmp_path) as process:
        try:
            _, said = process.communicate(timeout=60)
            assert process.returncode == 1 and "exit status 3" in said and "before it was ready" in said
        finally:
            end(process.pid)
