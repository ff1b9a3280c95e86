"""The host record, and the host key made of the part that numbers depend on."""

from __future__ import annotations

import copy
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddtree_bench.targets import host_facts
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


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Path]:
    """A sparse safetensors file above the size that is read whole: 200 MiB, with a header of 64 bytes."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 64) + b'{"a": 1}'.ljust(64))
        file.truncate(200 * 2**20)
    yield path


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


def test_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + b"weights")
    (tmp_path / "README.md").write_text("text")
    before = host_facts.model_facts(tmp_path)
    assert [file["name"] for file in before["files"]] == ["config.json", "model-1.safetensors"]
    (tmp_path / "README.md").write_text("other text")
    assert host_facts.model_facts(tmp_path)["fingerprint"] == before["fingerprint"]
    (tmp_path / "config.json").write_text('{"rope": 1}')
    assert host_facts.model_facts(tmp_path)["fingerprint"] != before["fingerprint"]


def test_the_name_of_a_single_file_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    (tmp_path / "b.gguf").write_bytes(b"weights")
    facts = [host_facts.model_facts(tmp_path / name)["fingerprint"] for name in ("a.gguf", "b.gguf")]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("offset", [10, 200 * 2**20 - 1])
def test_large_files_are_sampled(weights: Path, offset: int) -> None:
    before = host_facts.file_digest(weights)
    with weights.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    assert host_facts.file_digest(weights) != before


def test_a_large_file_that_grew_is_another(weights: Path) -> None:
    before = host_facts.file_digest(weights)
    with weights.open("r+b") as file:
        file.truncate(201 * 2**20)
    assert host_facts.file_digest(weights) != before


def test_the_header_of_safetensors_is_what_the_file_says(weights: Path) -> None:
    assert host_facts.header_bytes(weights) == 72
    assert host_facts.header_bytes(weights.with_suffix(".gguf")) == 2**20


def test_nvidia_smi_is_read() -> None:
    line = "NVIDIA RTX PRO 6000, GPU-{}, 97887, 600.00, 3090, 180, 405, 00000000:01:00.0, 580.95.05\n"
    gpus, driver, cuda = host_facts.parse_smi(
        line.format("a") + line.format("b").replace("600.00", "[N/A]"),
        "| Driver Version: 580.95.05  CUDA Version: 13.0 |",
    )
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-a", "GPU-b"]
    assert (gpus[0]["power_limit_w"], gpus[1]["power_limit_w"]) == (600, None)
    assert gpus[0]["memory_mib"] == 97887 and "driver" not in gpus[0]
    assert (driver, cuda) == ("580.95.05", "13.0")


def test_nvml_values_that_a_gpu_does_not_have_are_null() -> None:
    class NVMLError(Exception):
        pass

    def unsupported(*_: Any) -> None:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda gpu: "B300",
        nvmlDeviceGetUUID=lambda gpu: "GPU-c",
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 1_100_000,
        nvmlDeviceGetMemoryInfo=unsupported,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId="00000000:01:00.0"),
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 2032,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 120 * kind,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlSystemGetDriverVersion=lambda: "590.1",
    )
    gpus, driver, cuda = host_facts.gpus_by_nvml(nvml)
    assert gpus[0]["power_limit_w"] == 1100 and gpus[0]["memory_mib"] is None
    assert gpus[0]["sm_clock_mhz"] == 120 and gpus[0]["memory_clock_mhz"] == 240
    assert (driver, cuda) == ("590.1", "13.1")
