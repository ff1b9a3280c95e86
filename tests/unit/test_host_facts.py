"""What is recorded of a machine: GPUs by the driver's library and by nvidia-smi, CPUs and memory, model files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_nvidia
import pytest
from fake_nvidia import UUIDS, use_smi, write_program, write_smi

from ddtree_bench.targets import cpu_facts, gpu_facts, host_facts, host_tools, model_facts, nvidia
from ddtree_bench.targets.local import LocalLauncher
from ddtree_bench.targets.probe import ModelFiles, host_key, probe

NO_VALUES = {"sm_clock_application_mhz", "memory_clock_application_mhz", "numa_node"}
"""What the GPUs of fake_nvidia do not have, whatever they are asked with."""

NOTHING = "nvidia-smi is not on the PATH, and nvidia-ml-py is not installed for this Python"

no_driver = pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvidia.build_library(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def smi_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without nvidia-ml-py."""
    monkeypatch.setattr(gpu_facts, "nvml_module", lambda: None)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Path]:
    """A sparse safetensors file above the size that is read whole: 200 MiB, with a header of 64 bytes."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 64) + b'{"a": 1}'.ljust(64))
        file.truncate(200 * 2**20)
    yield path


def probed(tmp_path: Path, python: str) -> dict[str, Any]:
    (tmp_path / "config.json").write_text("{}")
    launcher = LocalLauncher(tmp_path / "leases", "test")
    return probe(launcher, python, "sglang", [ModelFiles("big", model_path=str(tmp_path))])


# GPUs


def test_eight_gpus_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smi_only: None) -> None:
    use_smi(monkeypatch, write_smi(tmp_path).parent)
    facts = gpu_facts.gpu_facts(tmp_path / "no-sys")
    gpus = facts.values["gpus"]
    assert [gpu["uuid"] for gpu in gpus] == list(UUIDS)
    assert (facts.values["driver"], facts.values["cuda"]) == ("580.95.05", "13.0")
    assert facts.values["topology"].startswith("\tGPU0\tGPU1") and "NV18" in facts.values["topology"]
    assert facts.missing == {}
    fifth = dict(gpus[5])
    assert fifth.pop("missing") == {
        "sm_clock_application_mhz": "nvidia-smi says [Requested functionality has been deprecated]",
        "memory_clock_application_mhz": "nvidia-smi says [Requested functionality has been deprecated]",
        "nvlink_version": "nvidia-smi does not tell it; nvidia-ml-py, where Python has it, does",
        "numa_node": "the kernel names no NUMA node for it",
    }
    assert fifth == {
        "name": "NVIDIA B300 SXM6 AC",
        "uuid": UUIDS[5],
        "vbios": "97.10.3B.00.01",
        "pci_bus": "00000000:6A:00.0",
        "memory_mib": 275040,
        "power_limit_w": 1000,
        "power_limit_default_w": 1100,
        "power_limit_max_w": 1100,
        "power_draw_w": 550.0,
        "sm_clock_max_mhz": 2032,
        "memory_clock_max_mhz": 3996,
        "sm_clock_mhz": 1905,
        "memory_clock_mhz": 3996,
        "sm_clock_application_mhz": None,
        "memory_clock_application_mhz": None,
        "persistence_mode": "Enabled",
        "compute_mode": "Default",
        "mig_mode": "Disabled",
        "ecc_mode": "Enabled",
        "ecc_errors_corrected": 12,
        "ecc_errors_uncorrected": 0,
        "pcie_generation": 1,
        "pcie_generation_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "nvlink_version": None,
        "nvlink": {"links": 18, "active": 18, "gb_per_s": [53.125], "said": None},
        "numa_node": None,
    }
    assert gpus[6]["nvlink"]["active"] == 17


def test_both_ways_record_the_same_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """By the real nvidia-ml-py on a driver's library, and by nvidia-smi with a Python that does not have it."""
    use_smi(monkeypatch, write_smi(tmp_path / "bin").parent)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    by_nvml = probed(tmp_path, sys.executable)
    by_smi = probed(tmp_path, sys._base_executable)  # type: ignore[attr-defined]
    assert by_smi["gpus"][0]["nvlink_version"] is None, "this Python has nvidia-ml-py: nothing was asked of nvidia-smi"
    assert [gpu.pop("nvlink_version") for gpu in by_nvml["gpus"]] == ["5.0"] * 8
    for gpu in by_smi["gpus"]:
        del gpu["nvlink_version"], gpu["missing"]["nvlink_version"]
    reasons = [gpu.pop("missing") for gpu in by_nvml["gpus"]]
    assert [set(found) for found in reasons] == [NO_VALUES] * 8
    assert reasons[0]["sm_clock_application_mhz"].startswith("the driver says: The requested functionality")
    assert [set(gpu.pop("missing")) for gpu in by_smi["gpus"]] == [NO_VALUES] * 8
    assert by_nvml["gpus"] == by_smi["gpus"]
    assert (by_nvml["driver"], by_nvml["cuda"]) == (by_smi["driver"], by_smi["cuda"]) == ("580.95.05", "13.0")
    assert host_key(by_nvml, "big", None) == host_key(by_smi, "big", None)


@no_driver
def test_without_a_driver_the_reasons_are_recorded(tmp_path: Path) -> None:
    record = probed(tmp_path, sys.executable)
    assert (record["gpus"], record["driver"], record["cuda"], record["topology"]) == ([], None, None, None)
    why = "no NVIDIA driver: NVML Shared Library Not Found"
    assert {record["missing"][name] for name in ("gpus", "driver", "cuda", "topology")} == {why}


@no_driver
def test_without_nvidia_smi_the_driver_still_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    record = probed(tmp_path, sys.executable)
    assert len(record["gpus"]) == 8 and record["topology"] is None
    assert record["missing"]["topology"] == "nvidia-smi is not on the PATH"
    assert record["gpus"][0]["missing"]["nvlink"] == "nvidia-smi is not on the PATH"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        pytest.param(None, NOTHING, marks=no_driver),
        (
            "#!/bin/sh\necho 'NVIDIA-SMI has failed because it cannot communicate with the NVIDIA driver.'; exit 9\n",
            "nvidia-smi failed: NVIDIA-SMI has failed because it cannot communicate with the NVIDIA driver., "
            "and nvidia-ml-py is not installed for this Python",
        ),
        (
            "#!/bin/sh\necho 'No devices were found'\n",
            "nvidia-smi printed 'No devices were found', and nvidia-ml-py is not installed for this Python",
        ),
    ],
)
def test_why_nvidia_smi_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smi_only: None, program: str | None, why: str
) -> None:
    if program is not None:
        use_smi(monkeypatch, write_program(tmp_path, program).parent)
    facts = gpu_facts.gpu_facts()
    assert facts.values["gpus"] == [] and facts.missing["gpus"] == why


def test_an_older_nvidia_smi_is_asked_for_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smi_only: None
) -> None:
    use_smi(monkeypatch, write_smi(tmp_path, unknown=["mig.mode.current", "power.max_limit"]).parent)
    gpu = gpu_facts.gpu_facts().values["gpus"][0]
    assert (gpu["mig_mode"], gpu["power_limit_max_w"], gpu["power_limit_w"]) == (None, None, 1000)
    assert gpu["missing"]["mig_mode"] == "nvidia-smi does not tell it; nvidia-ml-py, where Python has it, does"


def test_what_a_newer_nvidia_smi_writes_otherwise_is_missing_with_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smi_only: None
) -> None:
    odd = {"memory.total": "275 GiB", "pcie.link.gen.max": "6.0", "power.draw": "550.00 +/- 5"}
    use_smi(monkeypatch, write_smi(tmp_path, instead=odd).parent)
    gpu = gpu_facts.gpu_facts().values["gpus"][0]
    assert (gpu["memory_mib"], gpu["pcie_generation_max"], gpu["power_draw_w"]) == (None, None, None)
    assert gpu["missing"]["memory_mib"] == "nvidia-smi says 275 GiB"
    assert gpu["name"] == "NVIDIA B300 SXM6 AC" and gpu["pcie_generation"] == 1


class NewerDriver:
    """nvidia-ml-py on a driver with a compute mode and an NVLink that have no name here, and that tells no more."""

    NVMLError = RuntimeError

    def nvmlDeviceGetComputeMode(self, gpu: int) -> int:
        return 4 + gpu

    def nvmlDeviceGetNvLinkVersion(self, gpu: int, link: int) -> int:
        return 9 + gpu + link

    def nvmlDeviceGetEccMode(self, gpu: int) -> list[int]:
        return [1 + gpu, 1]


def test_numbers_of_a_newer_driver_are_missing_with_the_number() -> None:
    names = ("compute_mode", "nvlink_version", "ecc_mode")
    told = nvidia.ask_nvml(NewerDriver(), 0, {name: gpu_facts.FIELDS[name] for name in names})
    assert told.values == {"compute_mode": None, "nvlink_version": None, "ecc_mode": "Enabled"}
    assert told.missing == {
        "compute_mode": "the driver says 4, which has no name here",
        "nvlink_version": "the driver says 9, which has no name here",
    }


def test_links_that_are_not_there() -> None:
    told = gpu_facts.nvlinks(
        "GPU 0: NVIDIA RTX PRO 6000 (UUID: GPU-a)\n\t NVML: Unable to retrieve NVLink information: Not Supported\n"
        "GPU 1: NVIDIA A100 80GB PCIe (UUID: GPU-b)\n\t Link 0: <inactive>\n\t Link 1: 25 GB/s\n"
    )
    assert told == {
        "GPU-a": {
            "links": 0,
            "active": 0,
            "gb_per_s": [],
            "said": "NVML: Unable to retrieve NVLink information: Not Supported",
        },
        "GPU-b": {"links": 2, "active": 1, "gb_per_s": [25.0], "said": None},
    }


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None)])
def test_the_numa_node_of_a_gpu(tmp_path: Path, text: str, node: int | None) -> None:
    device = tmp_path / "bus/pci/devices/0001:ab:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(text)
    assert gpu_facts.numa_node(tmp_path, "00000001:AB:00.0") == node
    assert gpu_facts.numa_node(tmp_path, "00000000:AB:00.0") is None


# CPUs, memory, and what else the kernel tells


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    """Four processors a socket, two of each core, numbered as servers number them."""
    cpus = {
        f"devices/system/cpu/cpu{n}/topology/{name}": str(value)
        for n in range(8)
        for name, value in (("physical_package_id", n // 2 % 2), ("core_id", n % 2))
    }
    write(
        tmp_path,
        cpus
        | {
            "devices/system/cpu/smt/active": "1",
            "devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
            "devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate",
            "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "4100000",
            "devices/system/cpu/intel_pstate/no_turbo": "1",
            "devices/system/node/node0/cpulist": "0-1,4-5",
            "devices/system/node/node0/meminfo": "Node 0 MemTotal:       263921884 kB",
            "devices/system/node/node10/cpulist": "",
            "devices/system/node/node2/cpulist": "2-3,6-7",
            "kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "class/dmi/id/sys_vendor": "Supermicro",
            "class/dmi/id/product_name": "AS -8126GS-TNMR",
        },
    )
    facts = cpu_facts.cpu_facts(sys_root=tmp_path)
    assert (facts["sockets"], facts["physical_cores"], facts["smt"], facts["numa_nodes"]) == (2, 4, True, 3)
    assert (facts["governor"], facts["frequency_driver"], facts["mhz_max"]) == ("performance", "intel_pstate", 4100)
    assert facts["boost"] is False and facts["missing"] == {}
    assert cpu_facts.numa_facts(tmp_path) == [
        {"node": 0, "cpus": "0-1,4-5", "memory_mib": 257736},
        {"node": 2, "cpus": "2-3,6-7", "memory_mib": None},
        {"node": 10, "cpus": "", "memory_mib": None},
    ]
    assert cpu_facts.huge_pages(tmp_path) == "madvise"
    assert host_facts.product(tmp_path) == "Supermicro AS -8126GS-TNMR"


def test_a_driver_that_boosts(tmp_path: Path) -> None:
    write(tmp_path, {"devices/system/cpu/cpufreq/boost": "1"})
    assert cpu_facts.cpu_facts(sys_root=tmp_path)["boost"] is True


def test_a_kernel_that_shows_nothing_says_why(tmp_path: Path) -> None:
    facts = cpu_facts.cpu_facts(proc=tmp_path, sys_root=tmp_path)
    assert facts["cores"] == len(os.sched_getaffinity(0)) and facts["model"]
    unknown = {name for name, value in facts.items() if value is None}
    assert (
        unknown
        == set(facts["missing"])
        == {*("sockets", "physical_cores", "smt", "governor", "frequency_driver", "mhz_max", "boost")}
    )
    assert facts["missing"]["governor"] == f"there is no {tmp_path}/devices/system/cpu/cpu0/cpufreq"
    assert cpu_facts.huge_pages(tmp_path) is None and host_facts.product(tmp_path) is None


def test_nothing_of_this_machine_is_null_without_a_reason(tmp_path: Path) -> None:
    def unexplained(part: dict[str, Any]) -> list[str]:
        return [name for name, value in part.items() if value is None and name not in part["missing"]]

    record = host_facts.facts({})
    assert unexplained(record) == unexplained(record["cpu"]) == []
    assert record["numa"] and record["kernel"] == os.uname().release


@no_driver
def test_it_runs_from_the_archive_on_a_bare_python(tmp_path: Path) -> None:
    archive = host_tools.archive(tmp_path)
    base = sys._base_executable  # type: ignore[attr-defined]
    argv = host_tools.command_line(base, str(archive), "ddtree_bench.targets.host_facts", '{"files": {}}')
    told = subprocess.run(argv, capture_output=True, text=True, check=True)
    record = json.loads(told.stdout)
    assert record["missing"]["gpus"] == NOTHING


# Model files


def test_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + b"weights")
    (tmp_path / "README.md").write_text("text")
    os.utime(tmp_path / "config.json", (86400, 86400))
    before = model_facts.model_facts(tmp_path)
    assert [file["name"] for file in before["files"]] == ["config.json", "model-1.safetensors"]
    assert before["files"][0]["modified"] == "1970-01-02T00:00:00.000+00:00"
    (tmp_path / "README.md").write_text("other text")
    os.utime(tmp_path / "config.json", (0, 0))
    assert model_facts.model_facts(tmp_path)["fingerprint"] == before["fingerprint"]
    (tmp_path / "config.json").write_text('{"rope": 1}')
    assert model_facts.model_facts(tmp_path)["fingerprint"] != before["fingerprint"]


def test_the_whole_content_is_digested_on_request(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text("[]")
    launcher = LocalLauncher(tmp_path / "leases", "test")
    files = [ModelFiles("big", model_path=str(tmp_path)), ModelFiles("one", model_path=str(weights))]
    sampled, full = (probe(launcher, sys.executable, "sglang", files, full=full)["models"] for full in (False, True))
    digests = {
        "config.json": hashlib.sha256(b"{}").hexdigest(),
        "model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "tokenizer/vocab.json": hashlib.sha256(b"[]").hexdigest(),
    }
    assert full["big"].pop("full_sha256") == digests
    assert full["one"].pop("full_sha256") == {"model.safetensors": digests["model.safetensors"]}
    assert full == sampled, "what tells contents apart is the same"


def test_the_name_of_a_single_file_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    (tmp_path / "b.gguf").write_bytes(b"weights")
    facts = [model_facts.model_facts(tmp_path / name)["fingerprint"] for name in ("a.gguf", "b.gguf")]
    assert facts[0] == facts[1]


def test_the_fingerprint_of_a_file_stays_what_it_was(tmp_path: Path) -> None:
    """Host keys are made of it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    prints = [model_facts.model_facts(path)["fingerprint"] for path in (tmp_path, tmp_path / "a.safetensors")]
    assert prints == [
        "dd1edae0dd070cd291d079a148746e3c38330f8e3c3e8d792a9128596e5d673b",
        "2a99894034e1aa66a52ed6e33da3e849de86e7d57e7c99f6f8263d0124ddad8e",
    ]


@pytest.mark.parametrize("offset", [10, 200 * 2**20 - 1])
def test_large_files_are_sampled(weights: Path, offset: int) -> None:
    before = model_facts.file_digest(weights)
    with weights.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    assert model_facts.file_digest(weights) != before


def test_a_large_file_that_grew_is_another(weights: Path) -> None:
    before = model_facts.file_digest(weights)
    with weights.open("r+b") as file:
        file.truncate(201 * 2**20)
    assert model_facts.file_digest(weights) != before


def test_the_header_of_safetensors_is_what_the_file_says(weights: Path) -> None:
    assert model_facts.header_bytes(weights) == 72
    assert model_facts.header_bytes(weights.with_suffix(".gguf")) == 2**20
