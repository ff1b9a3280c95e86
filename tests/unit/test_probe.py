"""The host record, and the host key made of the part that numbers depend on."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.local import LocalLauncher
from ddtree_bench.targets.probe import (
    HostChanged,
    ModelFiles,
    check_unchanged,
    differences,
    host_key,
    knows_model,
    probe,
    recorded_name,
)


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher(tmp_path / "leases", "test")


GPU = {"name": "RTX", "uuid": "GPU-1", "memory_mib": 97887, "power_limit_w": 600, "sm_clock_mhz": 210}
RECORD: dict[str, Any] = {
    "hostname": "h",
    "kernel": "6.1",
    "time": "then",
    "cpu": {"model": "EPYC", "cores": 64},
    "gpus": [GPU, {**GPU, "uuid": "GPU-2"}],
    "driver": "580.1",
    "cuda": "13.0",
    "models": {
        "big": {"fingerprint": "a" * 64, "path": "/m/big"},
        "drafter": {"fingerprint": "b" * 64, "path": "/m/drafter"},
    },
}


def changed(*path: Any, value: Any) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    place: Any = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return record


def test_this_machine(launcher: LocalLauncher) -> None:
    record = probe(launcher, sys.executable, "reference", [ModelFiles("toy", "toy-dflash")])
    assert record["cpu"]["cores"] == len(os.sched_getaffinity(0)) and record["kernel"] == os.uname().release
    assert record["memory_bytes"] == psutil.virtual_memory().total
    assert set(record["models"]) == {"toy", "toy-dflash"}
    assert record["models"]["toy"]["files"][0]["bytes"] > 0
    assert json.loads(json.dumps(record)) == record
    key = host_key(record, "toy", "toy-dflash")
    again = probe(launcher, sys.executable, "reference", [ModelFiles("toy", "toy-dflash")])
    assert len(key) == 64 and host_key(again, "toy", "toy-dflash") == key
    assert differences(record, again) == []


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("gpus",), [GPU], "GPUs: was 2 x RTX, is 1 x RTX"),
        (("gpus", 1, "name"), "B300", "GPUs: was 2 x RTX, is 1 x B300, 1 x RTX"),
        (("gpus", 1, "power_limit_w"), 450, r"GPU power limits \(W\): was 600, is 450, 600"),
        (("driver",), "590.2", "GPU driver: was 580.1, is 590.2"),
        (("cpu", "model"), "Xeon", "CPU: was EPYC, is Xeon"),
        (("cpu", "cores"), 32, "cores: was 64, is 32"),
        (("models", "big", "fingerprint"), "c" * 64, r"content of model big \(/m/big\)"),
        (("models", "drafter", "fingerprint"), "c" * 64, r"content of model drafter \(/m/drafter\)"),
    ],
)
def test_what_is_keyed(path: tuple[Any, ...], value: Any, words: str) -> None:
    other = changed(*path, value=value)
    assert host_key(other, "big", "drafter") != host_key(RECORD, "big", "drafter")
    with pytest.raises(HostChanged, match=f"host has changed: {words}; `snakemake probe` accepts it"):
        check_unchanged(RECORD, other)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("gpus", 0, "uuid"), "GPU-9"),
        (("gpus", 0, "ecc_mode"), "Disabled"),
        (("cpu", "governor"), "powersave"),
        (("missing",), {"topology": "nvidia-smi is not on the PATH"}),
        (("gpus", 0, "sm_clock_mhz"), 2400),
        (("kernel",), "6.9"),
        (("hostname",), "renamed"),
        (("time",), "now"),
        (("models", "big", "path"), "/elsewhere/big"),
    ],
)
def test_what_is_recorded_and_not_keyed(path: tuple[Any, ...], value: Any) -> None:
    other = changed(*path, value=value)
    assert host_key(other, "big", "drafter") == host_key(RECORD, "big", "drafter")
    check_unchanged(RECORD, other)


def test_the_key_of_a_record_stays_what_it_was() -> None:
    """Store entries are found by it."""
    assert host_key(RECORD, "big", "drafter") == "ef4b6ac216424f868f5a65f4b925e058743a9a1320627ef97d443447bd7019b1"


def test_the_order_of_gpus_and_the_models_of_others_do_not_count() -> None:
    other = changed("gpus", value=RECORD["gpus"][::-1])
    other["models"]["third"] = {"fingerprint": "d" * 64, "path": "/m/third"}
    assert host_key(other, "big", "drafter") == host_key(RECORD, "big", "drafter")
    assert host_key(RECORD, "big", None) != host_key(RECORD, "big", "drafter")
    check_unchanged(RECORD, other)


def test_a_model_that_was_not_probed_is_named() -> None:
    with pytest.raises(TargetError, match="model small: is not in the target's record, which has big, drafter"):
        host_key(RECORD, "small", None)


def test_another_revision_is_another_model_whatever_its_content() -> None:
    old, new = (recorded_name("micro", revision) for revision in ("1", "2"))
    other = changed("models", value={new: {"fingerprint": "e" * 64, "path": "/m/2"}})
    check_unchanged(changed("models", value={old: {"fingerprint": "d" * 64, "path": "/m/1"}}), other)
    assert not knows_model(other, old) and knows_model(other, new)
    with pytest.raises(HostChanged, match=r"content of model micro@2 \(/m/2\)"):
        check_unchanged(other, changed("models", value={new: {"fingerprint": "f" * 64, "path": "/m/2"}}))


def test_models_are_recorded_by_name_and_revision(launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = ModelFiles("big", "small", str(tmp_path), str(tmp_path), "1", "2")
    assert set(probe(launcher, sys.executable, "sglang", [files])["models"]) == {"big@1", "small@2"}


def test_a_record_without_revisions_knows_every_revision_of_a_name() -> None:
    assert host_key(RECORD, "big@1", "drafter@2") == host_key(RECORD, "big", "drafter")
    assert not knows_model(RECORD, "bigger@1")


def test_a_model_without_a_path_and_one_without_files_are_named(launcher: LocalLauncher, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="model Kimi: has no path"):
        probe(launcher, sys.executable, "sglang", [ModelFiles("Kimi")])
    with pytest.raises(TargetError, match=f"model Kimi: there is nothing at {tmp_path}/absent"):
        probe(launcher, sys.executable, "sglang", [ModelFiles("Kimi", model_path=f"{tmp_path}/absent")])
    with pytest.raises(TargetError, match=r"neither config\.json nor weight files"):
        probe(launcher, sys.executable, "sglang", [ModelFiles("Kimi", model_path=str(tmp_path))])
