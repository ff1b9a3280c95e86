"""Deploy a wheelhouse to a target: a folder of its own there, named by the environment's key."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree_bench import keys
from ddtree_bench.environments import installer, manifest
from ddtree_bench.environments.key import EnvironmentFailed, sha256
from ddtree_bench.targets.launcher import Launcher

VERIFY_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 3600.0
ALGORITHM = "DDTREE"
CHECKS = {
    "reference": {
        "imports": ["torch", "tokenizers", "fastapi", "uvicorn", "ddtree_reference"],
        "help": ["-m", "ddtree_reference", "serve", "--help"],
    },
    "sglang": {
        "imports": ["torch", "sglang", "sglang_ddtree"],
        "help": ["-m", "sglang.launch_server", "--help"],
    },
}


def deploy(
    launcher: Launcher,
    wheelhouse: Path,
    root: str,
    python: str = sys.executable,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Install a wheelhouse on a target in `root`/<engine>-<key>-<tag> and return the receipt; no-op when it is there.

    `root` and `python`, of the wheelhouse's version, are the target's. The receipt holds engine, key, folder, python
    (the environment's), versions, manifest_sha256 and the seconds it took. Raises EnvironmentFailed.
    """
    built = manifest.read(wheelhouse)
    folder = f"{root.rstrip('/')}/{built.engine}-{keys.short(built.key)}-{built.python}"
    request: dict[str, Any] = {
        "action": "verify",
        "engine": built.engine,
        "key": built.key,
        "python": built.python,
        "folder": folder,
        "manifest_sha256": sha256(wheelhouse / manifest.NAME),
    }
    receipt = _on_target(launcher, python, request, VERIFY_TIMEOUT_S, report)
    if receipt is not None:
        report(f"{folder}: already deployed")
        return receipt
    wheels = manifest.wheels_folder(wheelhouse)
    if not launcher.shares_files:
        launcher.copy_in(wheels, f"{folder}.wheels")
    request |= {
        "action": "install",
        "wheels_folder": str(wheels.resolve()) if launcher.shares_files else f"{folder}.wheels",
        "wheels": [{"name": wheel.name, "file": wheel.file, "sha256": wheel.sha256} for wheel in built.wheels],
        "algorithm": ALGORITHM,
        **CHECKS[built.engine],
    }
    receipt = _on_target(launcher, python, request, INSTALL_TIMEOUT_S, report)
    if receipt is None:
        raise EnvironmentFailed(f"{folder}: the installer gave no receipt; remove the folder and deploy again")
    report(f"{folder}: deployed in {receipt['seconds']:.0f} s")
    return receipt


def _on_target(
    launcher: Launcher, python: str, request: dict[str, Any], timeout_s: float, report: Callable[[str], None]
) -> dict[str, Any] | None:
    installing = request["action"] == "install"
    result = launcher.run_command(
        [python, "-", json.dumps(request)],
        timeout_s=timeout_s,
        stdin=Path(installer.__file__).read_text(),
        report=(lambda line: report(line) if line and not line.startswith("{") else None) if installing else None,
    )
    if result.exit_code != 0:
        raise EnvironmentFailed(f"{request['folder']}: {request['action']} failed: {result.stderr.strip()}")
    receipt: dict[str, Any] | None = json.loads(result.stdout.splitlines()[-1])
    return receipt
