"""The workflow with the real SGLang on this machine's CPU, from the environment to the figures, and `serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import requests
from clone import REPOSITORY, Clone

from ddtree_bench.config import read_files
from ddtree_bench.records.store import REQUESTS
from ddtree_bench.targets import processes

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

CONFIG = "config/sglang-micro-ci.yaml"
FIRST_TIME_S = 1500
"""Longest time of a pass that builds the environment and trains the model as well."""


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A clone in which the configuration for CI has been measured once."""
    clone = Clone.make(tmp_path_factory.mktemp("sglang") / "clone")
    clone.config = read_files([REPOSITORY / "config" / "config.yaml", REPOSITORY / CONFIG])
    process = clone.start()
    try:
        output, _ = process.communicate(timeout=FIRST_TIME_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        left = clone.processes() if process.returncode == 0 else []
    assert process.returncode == 0, output
    assert not left, "no process of a server outlives its run"
    yield clone
    for remaining in clone.processes():
        remaining.kill()


def of_method(clone: Clone) -> dict[str, dict[str, Any]]:
    return {record["identity"]["server"]["method"]: record for record in clone.records()}


def test_every_method_was_measured_on_a_start_of_its_own(passed: Clone) -> None:
    records = of_method(passed)
    assert set(records) == {"AR", "DFLASH", "DDTREE"}
    for record in records.values():
        assert (record["status"], record["request_statuses"]) == ("ok", {"ok": 4}), record["reason"]
        told = record["server_info"]
        assert told["version"] == "0.5.23" and told["ddtree_start_id"] == record["start_id"]
    assert len({record["start_id"] for record in records.values()}) == 3
    tree = records["DDTREE"]["server_info"]
    assert (tree["speculative_ddtree_budget"], tree["speculative_ddtree_topk_cap"]) == (8, 8)
    assert (tree["speculative_dflash_block_size"], tree["speculative_num_draft_tokens"]) == (8, 9)


def texts(clone: Clone, method: str) -> list[str]:
    (cell,) = (path.parent for path in clone.store.glob("*/*/attempts/*/record.json") if method_of(path) == method)
    return [str(text) for text in pd.read_parquet(cell / REQUESTS).sort_values("index")["text"]]


def method_of(record: Path) -> str:
    return str(json.loads(record.read_text())["identity"]["server"]["method"])


def test_drafts_change_no_answer(passed: Clone) -> None:
    plain = texts(passed, "AR")
    assert all(plain) and texts(passed, "DFLASH") == plain == texts(passed, "DDTREE")


def test_tables_and_figures_are_those_of_every_configuration(passed: Clone) -> None:
    results = passed.root / "results"
    cells = pd.read_csv(results / "tables" / "cells.csv").set_index("method")
    assert set(cells["engine"]) == {"sglang"}
    assert (cells.loc[["DFLASH", "DDTREE"], "accept_length"] > 1.5).all() and pd.isna(cells.loc["AR", "accept_length"])
    assert (cells["token_source"] == "usage").all()
    assert (cells.loc["DDTREE", "tree_nodes_per_round"], cells.loc["DDTREE", "tree_is_chain"]) == (8, False)
    assert cells.loc["DDTREE", "tree_branching_nodes_per_round"] > 0 and pd.isna(cells.loc["AR", "tree_is_chain"])
    speedup = pd.read_csv(results / "tables" / "speedup.csv")
    assert set(speedup["method"]) == {"DFLASH", "DDTREE"}
    for figure in ("budget_sweep", "concurrency", "speedup", "acceptance"):
        assert (results / "figures" / f"{figure}.pdf").stat().st_size > 1000
    assert "micro-plain" in (results / "report.html").read_text()


def test_nothing_is_measured_again(passed: Clone) -> None:
    starts = passed.starts()
    assert "Nothing to be done" in passed.snakemake()
    assert passed.starts() == starts


def test_the_rule_of_the_training_leaves_weights_that_are_there(passed: Clone) -> None:
    (weights,) = (passed.root / "results" / "micro_models").glob("*/target/model.safetensors")
    receipt = weights.parents[1].with_name(f"{weights.parents[1].name}.trained.json")
    digest = json.loads(receipt.read_text())["digest"]
    before, starts = weights.stat(), passed.starts()
    passed.snakemake("--forcerun", f"train_micro_model_plain_{digest}", "--until", f"train_micro_model_plain_{digest}")
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert "Nothing to be done" in passed.snakemake() and passed.starts() == starts


def test_serve_starts_one_of_its_servers_and_leaves_nothing(passed: Clone) -> None:
    passed.write_config()
    port = processes.free_port()
    command = [sys.executable, "-m", "ddtree_bench", "serve", "--config", str(passed.root / "config" / "config.yaml")]
    process = subprocess.Popen(
        [*command, "--method", "DDTREE", "--budget", "8", "--port", str(port)],
        cwd=passed.root,
        env=passed.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url == f"http://127.0.0.1:{port}"
        told = requests.get(f"{url}/server_info", timeout=30).json()
        assert (told["speculative_algorithm"], told["speculative_ddtree_budget"]) == ("DDTREE", 8)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 4, "the watchdog, and the three processes with which SGLang serves"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert not psutil.wait_procs(started, timeout=20)[1]
    assert processes.is_free(port)
