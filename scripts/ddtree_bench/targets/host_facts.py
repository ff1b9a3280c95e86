"""What machine this is and what the model files on it hold: a program for any target. Standard library only.

    python -m ddtree_bench.targets.host_facts '{"files": {"NAME": "PATH", ...}, "full": false}'

Prints one JSON object. Of what is not known `missing` says why, by name, in each part that lacks something.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree_bench.targets.cpu_facts import SYS, cpu_facts, huge_pages, numa_facts, read_text
from ddtree_bench.targets.gpu_facts import gpu_facts
from ddtree_bench.targets.model_facts import model_facts

DETECT = "systemd-detect-virt"
DETECT_TIMEOUT_S = 10.0
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def facts(files: dict[str, str], full: bool = False) -> dict[str, Any]:
    """Return everything that is recorded of this machine; `files` are model files or folders by name.

    `full` has the whole content of every model file digested, which takes as long as it takes to read.
    """
    gpus = gpu_facts()
    known = {
        "hostname": platform.node(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "product": product(),
        "virtual_machine": virtualization("--vm"),
        "container": virtualization("--container") or _container_mark(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu": cpu_facts(),
        "numa": numa_facts(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": huge_pages(),
        **gpus.values,
        "models": {name: model_facts(Path(path), full) for name, path in files.items()},
    }
    return {**known, "missing": {**_missing(known), **gpus.missing}}


def _missing(known: dict[str, Any]) -> dict[str, str]:
    untold = f"{DETECT} is not there or cannot tell"
    unknown = {
        "product": f"there is no {SYS / 'class/dmi/id/product_name'}",
        "virtual_machine": untold,
        "container": untold,
        "huge_pages": "this kernel has no transparent huge pages",
    }
    return {name: why for name, why in unknown.items() if known[name] is None}


def product(sys_root: Path = SYS) -> str | None:
    """Return the machine's maker and product name, as its firmware has them."""
    words = (read_text(sys_root / "class/dmi/id" / name).strip() for name in ("sys_vendor", "product_name"))
    return " ".join(word for word in words if word) or None


def virtualization(kind: str) -> str | None:
    """Return what this machine is virtualized by, `none`, or None where systemd does not say; --vm or --container."""
    if shutil.which(DETECT) is None:
        return None
    try:
        # It fails when it prints `none`.
        told = subprocess.run([DETECT, kind], capture_output=True, text=True, timeout=DETECT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return told.stdout.strip() or None


def _container_mark() -> str | None:
    """What a container engine left in the root folder, for where systemd does not say."""
    return next((f"{mark} is there" for mark in CONTAINER_MARKS if mark.exists()), None)


def main(request: dict[str, Any]) -> None:
    """Print the facts that are asked for. Exits with what is missing when there is nothing at a model's path."""
    for name, path in request["files"].items():
        if not Path(path).exists():
            sys.exit(f"model {name}: there is nothing at {path} on {platform.node()}")
    print(json.dumps(facts(request["files"], request.get("full", False))))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
