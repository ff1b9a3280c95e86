"""A machine with 8 NVIDIA GPUs: nvidia-smi and the driver's library as they answer there, in the real formats.

Both tell the same of the same machine; what only one of them can tell is as on real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

GPUS = 8
UUIDS = tuple(f"GPU-{index:08d}-1111-2222-3333-444444444444" for index in range(GPUS))
DEPRECATED = "[Requested functionality has been deprecated]"
LIBRARY_SOURCE = Path(__file__).with_name("fake_nvml.c")


def texts(index: int) -> dict[str, str]:
    """What nvidia-smi prints of a GPU, by field, without units."""
    return {
        "name": "NVIDIA B300 SXM6 AC",
        "uuid": UUIDS[index],
        "driver_version": "580.95.05",
        "vbios_version": "97.10.3B.00.01",
        "pci.bus_id": f"00000000:{0x1A + 0x10 * index:02X}:00.0",
        "memory.total": "275040",
        "memory.used": "4" if index == 7 else "4096",
        "enforced.power.limit": "1000.00",
        "power.default_limit": "1100.00",
        "power.max_limit": "1100.00",
        "power.draw": f"{500 + 10 * index}.00",
        "clocks.max.sm": "2032",
        "clocks.max.mem": "3996",
        "clocks.sm": f"{1900 + index}",
        "clocks.mem": "3996",
        "clocks.applications.graphics": DEPRECATED,
        "clocks.applications.memory": DEPRECATED,
        "temperature.gpu": f"{40 + index}",
        "temperature.memory": "N/A",
        "utilization.gpu": f"{10 * index}",
        "clocks_event_reasons.active": "0x0000000000000004" if index == 3 else "0x0000000000000001",
        "clocks_throttle_reasons.active": "0x0000000000000004" if index == 3 else "0x0000000000000001",
        "persistence_mode": "Enabled",
        "compute_mode": "Default",
        "mig.mode.current": "Disabled",
        "ecc.mode.current": "Enabled",
        "ecc.errors.corrected.volatile.total": "12" if index == 5 else "0",
        "ecc.errors.uncorrected.volatile.total": "0",
        "pcie.link.gen.current": "1",
        "pcie.link.gen.max": "5",
        "pcie.link.width.current": "16",
        "pcie.link.width.max": "16",
    }


def topology() -> str:
    """What `nvidia-smi topo -m` prints: tabs, and a head that is underlined even in a pipe."""
    names = [f"GPU{index}" for index in range(GPUS)]
    head = "\x1b[4m\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m\n"
    rows = []
    for index, name in enumerate(names):
        links = "\t".join(" X " if other == index else "NV18" for other in range(GPUS))
        rows.append(f"{name}\t{links}\t{'0-55,112-167' if index < 4 else '56-111,168-223'}\t{index // 4}\t\tN/A\n")
    return (
        head + "".join(rows) + "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )


def links() -> str:
    """What `nvidia-smi nvlink --status` prints; one link of GPU 6 does not run."""
    blocks = []
    for index, uuid in enumerate(UUIDS):
        states = ["<inactive>" if (index, link) == (6, 17) else "53.125 GB/s" for link in range(18)]
        blocks.append(f"GPU {index}: NVIDIA B300 SXM6 AC (UUID: {uuid})\n")
        blocks += [f"\t Link {link}: {state}\n" for link, state in enumerate(states)]
    return "".join(blocks)


SUMMARY = (
    "+-----------------------------------------------------------------------------------------+\n"
    "| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |\n"
    "|-----------------------------------------+------------------------+----------------------+\n"
)

PROGRAM = """#!{python} -I
import sys
answers, unknown = {answers!r}, {unknown!r}
arguments = sys.argv[1:]
if not arguments:
    print({summary!r}, end="")
elif arguments == ["topo", "-m"]:
    print({topology!r}, end="")
elif arguments == ["nvlink", "--status"]:
    print({links!r}, end="")
elif len(arguments) == 2 and arguments[1] == "--format=csv,noheader,nounits":
    fields = arguments[0].removeprefix("--query-gpu=").split(",")
    for field in fields:
        if field not in answers[0] or field in unknown:
            print(f'Field "{{field}}" is not a valid field to query.')
            print()
            sys.exit(2)
    for gpu in answers:
        print(", ".join(gpu[field] for field in fields))
else:
    print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
    sys.exit(1)
"""


def write_smi(folder: Path, unknown: Iterable[str] = (), instead: Mapping[str, str] | None = None) -> Path:
    """Write nvidia-smi into a folder.

    An older release does not know the fields in `unknown`; a newer one may write others `instead`.
    """
    text = PROGRAM.format(
        python=sys.executable,
        answers=[{**texts(index), **(instead or {})} for index in range(GPUS)],
        unknown=set(unknown),
        summary=SUMMARY,
        topology=topology(),
        links=links(),
    )
    return write_program(folder, text)


def write_program(folder: Path, text: str) -> Path:
    """Write a program that is called nvidia-smi into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-smi"
    path.write_text(text)
    path.chmod(0o755)
    return path


def build_library(folder: Path) -> Path:
    """Build the driver's library in a folder; a program finds it that has the folder in LD_LIBRARY_PATH."""
    path = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), str(LIBRARY_SOURCE)], check=True)
    return path


def use_smi(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Put the nvidia-smi of a folder before all else on the PATH."""
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
