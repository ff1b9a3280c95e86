"""Whatever is killed in the middle of a run, nothing is left half a minute later, and the next start goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from clone import Clone, eventually

LEFT_AFTER_S = 30.0


@pytest.fixture
def slow(fresh: Clone) -> Clone:
    """A clone with two cells in its one run, the second long enough to be killed in."""
    fresh.config["workloads"]["second"] |= {"max_tokens": 1500, "n_min": 4, "ignore_eos": True}
    fresh.config["allow_missing_baseline"] = True
    fresh.block.update(method=["DDTREE"], workload=["first", "second"])
    return fresh


def command_of(process: psutil.Process) -> str:
    """Its command line as it was when it was listed: it may have ended since."""
    return " ".join(process.info["cmdline"] or [])


def find(clone: Clone, word: str) -> psutil.Process:
    """The process of a clone whose command line has `word`, once it runs."""

    def look() -> psutil.Process | None:
        return next((p for p in clone.processes() if word in command_of(p)), None)

    process: psutil.Process = eventually(look, 60, f"a process with {word!r}")
    return process


def in_the_second_cell(clone: Clone) -> None:
    """Wait until the first cell is stored and the second is being measured."""
    eventually(lambda: len(clone.records()) == 1, 90, "the first cell in the store")
    time.sleep(1.0)


def nothing_is_left(clone: Clone) -> None:
    eventually(lambda: not clone.processes(), LEFT_AFTER_S, f"no process left, but there are {clone.processes()}")


def finish(clone: Clone) -> None:
    """Run again with a short second cell in place of the long one and see that the first was not measured again."""
    clone.config["workloads"]["second"]["max_tokens"] = 16
    clone.measure()
    assert sorted(record["labels"]["workload"] for record in clone.records()) == ["first", "second"]
    assert all(record["status"] == "ok" for record in clone.records())


def kill_snakemake(clone: Clone, process: subprocess.Popen[str]) -> None:
    process.kill()


def kill_measuring(clone: Clone, process: subprocess.Popen[str]) -> None:
    find(clone, "measure_run.py").kill()


def interrupt(clone: Clone, process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def terminate_measuring(clone: Clone, process: subprocess.Popen[str]) -> None:
    find(clone, "measure_run.py").send_signal(signal.SIGTERM)


@pytest.mark.parametrize("end", [kill_snakemake, kill_measuring, interrupt, terminate_measuring])
def test_nothing_is_left_and_the_first_cell_is_kept(
    slow: Clone, end: Callable[[Clone, subprocess.Popen[str]], None]
) -> None:
    process = slow.start()
    try:
        in_the_second_cell(slow)
        assert find(slow, "ddtree_reference")
        end(slow, process)
        nothing_is_left(slow)
    finally:
        process.kill()
        process.communicate()
    assert len(slow.records()) == 1
    finish(slow)


def test_a_snakemake_killed_before_its_run_has_begun(fresh: Clone) -> None:
    fresh.snakemake("results/targets/local.json")
    process = fresh.start("--", "measure")
    find(fresh, "measure_run.py")
    process.kill()
    process.communicate()
    nothing_is_left(fresh)
    assert fresh.records() == []
    fresh.measure()
    assert len(fresh.records()) == 3


def test_a_second_workflow_in_the_same_folder_is_refused_and_commands_that_look_are_not(fresh: Clone) -> None:
    process = fresh.start("--", "measure")
    try:
        find(fresh, "ddtree_reference serve")
        assert "locked" in fresh.snakemake("--", "measure", status=1)
        assert "cells in 3 runs" in fresh.snakemake("plan")
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    finally:
        process.kill()
    assert len(fresh.records()) == 3


def test_a_killed_server_is_a_result(slow: Clone) -> None:
    process = slow.start()
    in_the_second_cell(slow)
    server = next(
        p for p in slow.processes() if "-m ddtree_reference serve" in command_of(p) and "watchdog" not in command_of(p)
    )
    server.kill()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    failed = next(record for record in slow.records() if record["status"] == "failed")
    assert failed["labels"]["workload"] == "second"
    assert "signal 9" in failed["reason"]
    assert failed["log_tail"]
    assert "warning: failed cell" in output
    nothing_is_left(slow)


def test_sigterm_to_snakemake_lets_the_run_end_well(fresh: Clone) -> None:
    fresh.config["allow_missing_baseline"] = True
    fresh.block.update(method=["DDTREE"])
    process = fresh.start()
    find(fresh, "ddtree_reference serve")
    process.terminate()
    process.communicate(timeout=120)
    nothing_is_left(fresh)
    assert [record["status"] for record in fresh.records()] == ["ok"]
    starts = fresh.starts()
    fresh.measure()
    assert fresh.starts() == starts


def test_two_workflows_on_one_target_never_overlap(fresh: Clone, tmp_path: Path) -> None:
    other = Clone.make(tmp_path / "other", lease_dir=fresh.lease_dir)
    try:
        processes = [clone.start("--resources", "mem_mb=1", "--", "measure") for clone in (fresh, other)]
        outputs = [process.communicate(timeout=280)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        records = sorted([*fresh.records(), *other.records()], key=lambda record: record["started_at"])
        assert len(records) == 6
        spans = [(record["started_at"], record["ended_at"]) for record in records]
        assert all(before[1] <= after[0] for before, after in pairwise(spans)), spans
        assert any("waiting for the lease" in output for output in outputs)
    finally:
        for process in other.processes():
            process.kill()


def test_resources_on_the_command_line_do_not_lift_the_limit(fresh: Clone) -> None:
    fresh.measure("--resources", "mem_mb=1", "--cores", "4")
    records = sorted(fresh.records(), key=lambda record: record["started_at"])
    assert len(records) == 3
    assert all(a["ended_at"] <= b["started_at"] for a, b in pairwise(records))
