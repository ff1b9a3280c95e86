"""The GPUs of this machine: what they are, how they are set, and how they are connected. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.targets.nvidia import (
    Answer,
    Field,
    Smi,
    Unavailable,
    ask_nvml,
    nvml_handles,
    nvml_module,
    nvml_session,
    smi_text,
)

MIB = 2**20
ENABLED = {0: "Disabled", 1: "Enabled"}
COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
NVLINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""By the driver's number for them."""

UNDERLINED = re.compile(r"\x1b\[\d*m")
"""nvidia-smi underlines the head of its matrix for a terminal, whatever it prints to."""

NOT_PLACED = "the kernel names no NUMA node for it"


def _whole(text: str) -> int:
    return round(float(text))


def _named(names: Mapping[int, str], number: int) -> str:
    if number not in names:
        raise ValueError(f"{number}, which has no name here")
    return names[number]


def _watts(milliwatts: int) -> int | None:
    return round(milliwatts / 1000) or None


FIELDS: Mapping[str, Field] = {
    "name": Field(("name",), str, lambda n, gpu: n.nvmlDeviceGetName(gpu)),
    "uuid": Field(("uuid",), str, lambda n, gpu: n.nvmlDeviceGetUUID(gpu)),
    "vbios": Field(("vbios_version",), str, lambda n, gpu: n.nvmlDeviceGetVbiosVersion(gpu)),
    "pci_bus": Field(("pci.bus_id",), str, lambda n, gpu: n.nvmlDeviceGetPciInfo(gpu).busId),
    "memory_mib": Field(("memory.total",), _whole, lambda n, gpu: n.nvmlDeviceGetMemoryInfo(gpu).total // MIB),
    "power_limit_w": Field(
        ("enforced.power.limit",), _whole, lambda n, gpu: _watts(n.nvmlDeviceGetEnforcedPowerLimit(gpu))
    ),
    "power_limit_default_w": Field(
        ("power.default_limit",), _whole, lambda n, gpu: _watts(n.nvmlDeviceGetPowerManagementDefaultLimit(gpu))
    ),
    "power_limit_max_w": Field(
        ("power.max_limit",), _whole, lambda n, gpu: _watts(n.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[1])
    ),
    "power_draw_w": Field(("power.draw",), float, lambda n, gpu: n.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "sm_clock_max_mhz": Field(
        ("clocks.max.sm",), _whole, lambda n, gpu: n.nvmlDeviceGetMaxClockInfo(gpu, n.NVML_CLOCK_SM)
    ),
    "memory_clock_max_mhz": Field(
        ("clocks.max.mem",), _whole, lambda n, gpu: n.nvmlDeviceGetMaxClockInfo(gpu, n.NVML_CLOCK_MEM)
    ),
    "sm_clock_mhz": Field(("clocks.sm",), _whole, lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM)),
    "memory_clock_mhz": Field(("clocks.mem",), _whole, lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_MEM)),
    "sm_clock_application_mhz": Field(
        ("clocks.applications.graphics",),
        _whole,
        lambda n, gpu: n.nvmlDeviceGetApplicationsClock(gpu, n.NVML_CLOCK_GRAPHICS),
    ),
    "memory_clock_application_mhz": Field(
        ("clocks.applications.memory",),
        _whole,
        lambda n, gpu: n.nvmlDeviceGetApplicationsClock(gpu, n.NVML_CLOCK_MEM),
    ),
    "persistence_mode": Field(
        ("persistence_mode",), str, lambda n, gpu: _named(ENABLED, n.nvmlDeviceGetPersistenceMode(gpu))
    ),
    "compute_mode": Field(
        ("compute_mode",), str, lambda n, gpu: _named(COMPUTE_MODES, n.nvmlDeviceGetComputeMode(gpu))
    ),
    "mig_mode": Field(("mig.mode.current",), str, lambda n, gpu: _named(ENABLED, n.nvmlDeviceGetMigMode(gpu)[0])),
    "ecc_mode": Field(("ecc.mode.current",), str, lambda n, gpu: _named(ENABLED, n.nvmlDeviceGetEccMode(gpu)[0])),
    "ecc_errors_corrected": Field(
        ("ecc.errors.corrected.volatile.total",),
        int,
        lambda n, gpu: n.nvmlDeviceGetTotalEccErrors(gpu, n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_VOLATILE_ECC),
    ),
    "ecc_errors_uncorrected": Field(
        ("ecc.errors.uncorrected.volatile.total",),
        int,
        lambda n, gpu: n.nvmlDeviceGetTotalEccErrors(gpu, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
    ),
    "pcie_generation": Field(
        ("pcie.link.gen.current",), int, lambda n, gpu: n.nvmlDeviceGetCurrPcieLinkGeneration(gpu)
    ),
    "pcie_generation_max": Field(("pcie.link.gen.max",), int, lambda n, gpu: n.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
    "pcie_width": Field(("pcie.link.width.current",), int, lambda n, gpu: n.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
    "pcie_width_max": Field(("pcie.link.width.max",), int, lambda n, gpu: n.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
    "nvlink_version": Field((), str, lambda n, gpu: _named(NVLINK_VERSIONS, n.nvmlDeviceGetNvLinkVersion(gpu, 0))),
}
"""What is recorded of a GPU. ECC errors are those since the driver was loaded. A link may run below its greatest
generation while the GPU idles; the greatest is that of GPU and slot together."""

DRIVER = Field(("driver_version",), str, lambda n, _: n.nvmlSystemGetDriverVersion())


def gpu_facts(sys_root: Path = Path("/sys")) -> Answer:
    """Return the GPUs, the driver's version, the CUDA version it supports, and the topology as nvidia-smi prints it.

    Without an NVIDIA driver there are no GPUs, and `missing` says why. Each GPU has a `missing` of its own.
    """
    nvml = nvml_module()
    try:
        facts = _by_smi() if nvml is None else _by_nvml(nvml)
    except Unavailable as error:
        why = f"{error}, and nvidia-ml-py is not installed for this Python" if nvml is None else str(error)
        return Answer({"gpus": [], "driver": None, "cuda": None, "topology": None}, _all(why))
    _tell(facts, "topology", lambda: UNDERLINED.sub("", smi_text("topo", "-m")))
    _add_links(facts.values["gpus"])
    for gpu in facts.values["gpus"]:
        _put(gpu, "numa_node", numa_node(sys_root, gpu["pci_bus"]), NOT_PLACED)
    return facts


def _all(why: str) -> dict[str, str]:
    return dict.fromkeys(("gpus", "driver", "cuda", "topology"), why)


def _by_nvml(nvml: Any) -> Answer:
    facts = Answer()
    with nvml_session(nvml):
        gpus = [_with_missing(ask_nvml(nvml, gpu, FIELDS)) for gpu in nvml_handles(nvml)]
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        facts.put("gpus", gpus, "")
        facts.put("driver", nvml.nvmlSystemGetDriverVersion(), "")
        facts.put("cuda", f"{cuda // 1000}.{cuda % 1000 // 10}", "")
    return facts


def _by_smi() -> Answer:
    answers = Smi({**FIELDS, "driver": DRIVER}).ask()
    facts = Answer()
    drivers = {answer.values.pop("driver") for answer in answers}
    facts.put("gpus", [_with_missing(answer) for answer in answers], "")
    facts.put("driver", next(iter(drivers), None), "nvidia-smi names no GPU")
    _tell(facts, "cuda", lambda: cuda_version(smi_text()))
    return facts


def cuda_version(summary: str) -> str | None:
    """Return the CUDA version that the driver supports, in what nvidia-smi prints without arguments."""
    found = re.search(r"CUDA[\w ]*Version\s*:\s*([\d.]+)", summary)
    return found.group(1) if found else None


def _with_missing(answer: Answer) -> dict[str, Any]:
    return {**answer.values, "missing": answer.missing}


def _put(gpu: dict[str, Any], name: str, value: Any, why: str) -> None:
    gpu[name] = value
    if value is None:
        gpu["missing"][name] = why


def _tell(facts: Answer, name: str, ask: Callable[[], str | None]) -> None:
    try:
        facts.put(name, ask(), "nvidia-smi does not tell it")
    except Unavailable as error:
        facts.put(name, None, str(error))


def _add_links(gpus: list[dict[str, Any]]) -> None:
    try:
        links = nvlinks(smi_text("nvlink", "--status"))
    except Unavailable as error:
        links, why = {}, str(error)
    else:
        why = "nvidia-smi nvlink does not name this GPU"
    for gpu in gpus:
        _put(gpu, "nvlink", links.get(gpu["uuid"]), why)


def nvlinks(status: str) -> dict[str, dict[str, Any]]:
    """Return the NVLinks of each GPU by its UUID, from what `nvidia-smi nvlink --status` prints.

    `links` is their number, `active` that of those which run, `gb_per_s` the speeds that these have, one direction, and
    `said` what is printed instead of links, such as that the GPU has none.
    """
    found = {}
    for block in re.split(r"^(?=GPU \d+:)", status, flags=re.MULTILINE):
        named = re.match(r"GPU \d+:.*\(UUID: ([^)]+)\)", block)
        if named is None:
            continue
        states = re.findall(r"Link \d+: *(.*)", block)
        speeds = [float(speed) for state in states for speed in re.findall(r"^([\d.]+) GB/s", state)]
        said = None if states else " ".join(block[named.end() :].split()) or None
        found[named.group(1)] = {
            "links": len(states),
            "active": len(speeds),
            "gb_per_s": sorted(set(speeds)),
            "said": said,
        }
    return found


def numa_node(sys_root: Path, pci_bus: str | None) -> int | None:
    """Return the NUMA node that a device hangs on; None where the kernel knows of none.

    `pci_bus` is as NVIDIA writes it, 00000000:1B:00.0; the kernel writes the domain with four digits.
    """
    if pci_bus is None:
        return None
    domain, _, place = pci_bus.lower().partition(":")
    try:
        node = int((sys_root / "bus/pci/devices" / f"{domain[-4:]}:{place}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
