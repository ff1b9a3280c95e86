"""What machine this is and what the model files on it hold: standard library only, sent to any target.

    python - '{"files": {"NAME": "PATH", ...}}' < host_facts.py

Prints one JSON object. GPUs are read through nvidia-ml-py where this Python has it, else through nvidia-smi.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MIB = 2**20
WHOLE_FILE = 64 * MIB
"""Files up to this size are read whole; of larger ones the header and samples at even distances."""

SAMPLE = 64 * 1024
SAMPLES = 32
WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
CONFIG_FILES = {"config.json", "generation_config.json", "quantize_config.json", "hf_quant_config.json"}
SMI_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "memory_mib": "memory.total",
    "power_limit_w": "enforced.power.limit",
    "sm_clock_max_mhz": "clocks.max.sm",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "pci_bus": "pci.bus_id",
    "driver": "driver_version",
}


def facts(files: dict[str, str]) -> dict[str, Any]:
    """Everything that is recorded of this machine; `files` are model files or folders by name."""
    gpus, driver, cuda = gpu_facts()
    return {
        "hostname": platform.node(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu": cpu_facts(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "driver": driver,
        "cuda": cuda,
        "topology": command_output("nvidia-smi", "topo", "-m"),
        "models": {name: model_facts(Path(path)) for name, path in files.items()},
    }


def cpu_facts() -> dict[str, Any]:
    """Model, processors that this process may use, NUMA nodes, and how the clock is governed."""
    info = read_text(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    wanted = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16"}
    clock = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    return {
        "model": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "online": os.cpu_count(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "instruction_sets": sorted(wanted & set(flags.group(1).split())) if flags else [],
        "governor": read_text(clock / "scaling_governor").strip() or None,
        "mhz": [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", info, re.MULTILINE)],
        "load_average": os.getloadavg(),
    }


def gpu_facts() -> tuple[list[dict[str, Any]], str | None, str | None]:
    """The GPUs, the driver's version and the CUDA version it supports; none of them without an NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        return gpus_by_smi()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None, None
    try:
        return gpus_by_nvml(pynvml)
    finally:
        pynvml.nvmlShutdown()


def gpus_by_nvml(nvml: Any) -> tuple[list[dict[str, Any]], str | None, str | None]:
    """GPUs through nvidia-ml-py; a value that a GPU does not support is null."""
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)

        def ask(name: str, *arguments: Any, gpu: Any = gpu) -> Any:
            try:
                return getattr(nvml, f"nvmlDeviceGet{name}")(gpu, *arguments)
            except nvml.NVMLError:
                return None

        power, memory, pci = ask("EnforcedPowerLimit"), ask("MemoryInfo"), ask("PciInfo")
        gpus.append(
            {
                "name": ask("Name"),
                "uuid": ask("UUID"),
                "memory_mib": memory.total // MIB if memory else None,
                "power_limit_w": round(power / 1000) if power else None,
                "sm_clock_max_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
                "sm_clock_mhz": ask("ClockInfo", nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": ask("ClockInfo", nvml.NVML_CLOCK_MEM),
                "pci_bus": pci.busId if pci else None,
            }
        )
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return gpus, nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}"


def gpus_by_smi() -> tuple[list[dict[str, Any]], str | None, str | None]:
    """GPUs through nvidia-smi."""
    query = f"--query-gpu={','.join(SMI_FIELDS.values())}"
    listed = command_output("nvidia-smi", query, "--format=csv,noheader,nounits")
    if listed is None:
        return [], None, None
    return parse_smi(listed, command_output("nvidia-smi") or "")


def parse_smi(listed: str, summary: str) -> tuple[list[dict[str, Any]], str | None, str | None]:
    """Read nvidia-smi's CSV (one GPU a line, SMI_FIELDS in order) and the CUDA version in its plain output."""
    gpus: list[dict[str, Any]] = []
    driver = None
    for line in listed.strip().splitlines():
        gpu: dict[str, Any] = dict(zip(SMI_FIELDS, (value.strip() for value in line.split(",")), strict=True))
        for name in ("memory_mib", "power_limit_w", "sm_clock_max_mhz", "sm_clock_mhz", "memory_clock_mhz"):
            gpu[name] = round(float(gpu[name])) if re.fullmatch(r"[\d.]+", gpu[name]) else None
        driver = gpu.pop("driver")
        gpus.append(gpu)
    cuda = re.search(r"CUDA[\w ]*Version:\s*([\d.]+)", summary)
    return gpus, driver, cuda.group(1) if cuda else None


def model_facts(path: Path) -> dict[str, Any]:
    """The fingerprint of a model's file, or of a folder's configuration and weight files; path and files beside it."""
    if path.is_dir():
        files = [f for f in path.iterdir() if f.name in CONFIG_FILES or f.suffix in WEIGHT_SUFFIXES]
    else:
        files = [path]
    if not files:
        raise SystemExit(f"model folder {path}: has neither config.json nor weight files")
    parts = [{"name": f.name, "bytes": f.stat().st_size, "sha256": file_digest(f)} for f in sorted(files)]
    content = [[part["name"], part["bytes"], part["sha256"]] for part in parts] if path.is_dir() else parts[0]["sha256"]
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return {"fingerprint": fingerprint, "path": str(path), "files": parts}


def file_digest(path: Path) -> str:
    """sha256 of a file's content; of one above 64 MiB: its size, its header and 32 samples of 64 KiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_FILE:
            digest.update(file.read())
            return digest.hexdigest()
        digest.update(file.read(header_bytes(path)))
        for index in range(SAMPLES):
            file.seek((size - SAMPLE) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def header_bytes(path: Path) -> int:
    """Length of the header: what a safetensors file says of itself, 1 MiB elsewhere."""
    if path.suffix != ".safetensors":
        return MIB
    with path.open("rb") as file:
        return min(8 + int.from_bytes(file.read(8), "little"), 64 * MIB)


def command_output(*argv: str) -> str | None:
    """Stdout of a command; None when it is not there or fails."""
    if shutil.which(argv[0]) is None:
        return None
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return result.stdout if result.returncode == 0 else None


def read_text(path: Path) -> str:
    """A file's text; empty when the kernel does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    for model_name, model_path in json.loads(sys.argv[1])["files"].items():
        if not Path(model_path).exists():
            sys.exit(f"model {model_name}: there is nothing at {model_path} on {platform.node()}")
    print(json.dumps(facts(json.loads(sys.argv[1])["files"])))
