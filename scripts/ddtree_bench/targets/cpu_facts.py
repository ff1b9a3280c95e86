"""The processors and the memory of this machine, and how their clocks and pages are governed. Standard library only.

Each function takes the folder that it reads, /proc or /sys.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

PROC, SYS = Path("/proc"), Path("/sys")
INSTRUCTION_SETS = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16"}
BOOST = (("cpufreq/boost", "1"), ("intel_pstate/no_turbo", "0"))
"""Below /sys/devices/system/cpu: where drivers say whether clocks may be boosted, and the text that means yes."""

FREQUENCY = "cpu0/cpufreq"


def cpu_facts(proc: Path = PROC, sys_root: Path = SYS) -> dict[str, Any]:
    """Return model, sockets, cores and how clocks are governed; `missing` says why something is not known.

    `cores` are the processors that this process may use, `online` those of the machine, hyperthreads counted;
    `physical_cores` counts each core once.
    """
    info, system = read_text(proc / "cpuinfo"), sys_root / "devices/system/cpu"
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    cores = {
        (read_text(path / "physical_package_id"), read_text(path / "core_id"))
        for path in system.glob("cpu[0-9]*/topology")
    }
    known = {
        "model": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "online": os.cpu_count(),
        "sockets": len({package for package, _ in cores}) or None,
        "physical_cores": len(cores) or None,
        "smt": _switch(system / "smt/active", "1"),
        "numa_nodes": len(list((sys_root / "devices/system/node").glob("node[0-9]*"))) or 1,
        "instruction_sets": sorted(INSTRUCTION_SETS & set(flags.group(1).split())) if flags else [],
        "governor": read_text(system / FREQUENCY / "scaling_governor").strip() or None,
        "frequency_driver": read_text(system / FREQUENCY / "scaling_driver").strip() or None,
        "mhz_max": _mhz(system / FREQUENCY / "cpuinfo_max_freq"),
        "boost": next((on for name, yes in BOOST if (on := _switch(system / name, yes)) is not None), None),
        "mhz": [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", info, re.MULTILINE)],
        "load_average": os.getloadavg(),
    }
    unknown = {
        "sockets": "the kernel shows no topology of its processors",
        "physical_cores": "the kernel shows no topology of its processors",
        "smt": f"there is no {system / 'smt/active'}",
        **dict.fromkeys(("governor", "frequency_driver", "mhz_max"), f"there is no {system / FREQUENCY}"),
        "boost": f"there is no {' or '.join(name for name, _ in BOOST)} in {system}",
    }
    return {**known, "missing": {name: why for name, why in unknown.items() if known[name] is None}}


def numa_facts(sys_root: Path = SYS) -> list[dict[str, Any]]:
    """Return the NUMA nodes: number, CPUs as the kernel lists them (0-31,64-95) and memory in MiB."""
    nodes = sorted((sys_root / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return [
        {
            "node": int(path.name[4:]),
            "cpus": read_text(path / "cpulist").strip(),
            "memory_mib": _memory_mib(read_text(path / "meminfo")),
        }
        for path in nodes
    ]


def huge_pages(sys_root: Path = SYS) -> str | None:
    """Return when the kernel gives huge pages unasked: always, madvise or never."""
    chosen = re.search(r"\[(\w+)\]", read_text(sys_root / "kernel/mm/transparent_hugepage/enabled"))
    return chosen.group(1) if chosen else None


def _memory_mib(meminfo: str) -> int | None:
    total = re.search(r"MemTotal:\s+(\d+) kB", meminfo)
    return int(total.group(1)) // 1024 if total else None


def _switch(path: Path, yes: str) -> bool | None:
    text = read_text(path).strip()
    return text == yes if text else None


def _mhz(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) // 1000 if text.isdigit() else None


def read_text(path: Path) -> str:
    """Return a file's text; empty when the kernel does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
