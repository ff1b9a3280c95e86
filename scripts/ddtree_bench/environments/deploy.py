"""Deploy a wheelhouse to a target: a folder of its own there, named by the environment's key."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ddtree_bench.environments import installer, manifest
from ddtree_bench.environments.key import sha256
from ddtree_bench.environments.manifest import Manifest
from ddtree_bench.environments.needs import needs_of
from ddtree_bench.environments.recipes import CLIENT, EnvironmentFailed, adopted_suffix, is_adopted
from ddtree_bench.environments.target_fit import require_fit
from ddtree_bench.environments.variables import engine_variables
from ddtree_bench.targets.launcher import Launcher
from ddtree_bench.targets.sole_writer import sole_writer

VERIFY_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 3600.0
WAIT_TIMEOUT_S = installer.WAIT_S + VERIFY_TIMEOUT_S
PROGRAM = Path(installer.__file__)
LOCK = "deploying.lock"
ALGORITHM = "DDTREE"
CHECKS: Mapping[str, Mapping[str, Any]] = {
    "reference": {
        "imports": ["torch", "tokenizers", "fastapi", "uvicorn", "ddtree_reference"],
        "help": ["-m", "ddtree_reference", "serve", "--help"],
    },
    "sglang": {
        "imports": ["torch", "sglang", "sglang_ddtree"],
        "help": ["-m", "sglang.launch_server", "--help"],
    },
    CLIENT: {
        "imports": ["pandas", "pyarrow.parquet", "requests", "psutil", "prometheus_client", "tokenizers", "pydantic"],
        "help": None,
    },
}
OF_CPU_BUILDS = {"sglang-cpu-platform": "sglang_cpu_platform.activation"}
"""What of our own is in some builds alone: the wheel, and the module that is imported to check it."""

RELEASE_TABLE = "sglang_ddtree/release.json"
"""In the plugin's wheel: the release of SGLang that it is made for, and the sha256 of the files that it hooks."""

IF_IT_RUNS = '"$@" 2>/dev/null || echo null'

AS_INTERPRETER = """\
case "$1" in "~" | "~/"*) set -- "$HOME${1#?}" ;; esac
if [ -d "$1" ]; then echo "$1/bin/python"; else echo "$1"; fi
"""


def deploy(
    launcher: Launcher,
    wheelhouse: Path,
    root: str,
    adopt: str | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Install a wheelhouse on a target in a folder below `root` and return the receipt; no-op when it is there.

    The folder has the environment's name; `root` is an absolute path of the target. `adopt` is the interpreter or the
    virtual environment there whose SGLang is used, for a wheelhouse of our own wheels alone; nothing is written into
    it. The receipt holds engine, build, key, folder, python (the environment's), versions, manifest_sha256, what was
    adopted, and the seconds it took. Wheels that were sent are removed when they are installed. Raises
    EnvironmentFailed, for what the target lacks before anything is sent, and TargetError.
    """
    built = manifest.read(wheelhouse)
    folder = f"{root.rstrip('/')}/{built.name}"
    request: dict[str, Any] = {
        "engine": built.engine,
        "build": built.build,
        "key": built.key,
        "python": built.python,
        "manifest_sha256": sha256(wheelhouse / manifest.NAME),
        "adopt": None,
    }
    adopted_python = None
    if is_adopted(built.environment):
        if adopt is None:
            raise EnvironmentFailed(f"{wheelhouse}: holds no SGLang; give `adopt`, where the target has one")
        adopted_python = _interpreter(launcher, adopt)
        request["adopt"] = {"path": adopt, **_release(wheelhouse, built)}
        # Several installations of one machine can be adopted side by side.
        folder += adopted_suffix(adopt)
    request["folder"] = folder
    receipt = _deployed(launcher, request, adopted_python or f"{folder}/bin/python")
    if receipt is not None:
        report(f"{folder}: already deployed")
        return receipt
    require_fit(launcher, root, folder, needs_of(wheelhouse, built, sent=not launcher.shares_files))
    with _alone(launcher, root, report):
        python = adopted_python or launcher.python(built.python)
        # An earlier call may be gone, and its installation go on.
        receipt = _on_target(launcher, python, {**request, "action": "verify", "wait": True}, WAIT_TIMEOUT_S, report)
        if receipt is None:
            receipt = _install(launcher, python, wheelhouse, built, request, report)
    report(f"{folder}: deployed in {receipt['seconds']:.0f} s")
    return receipt


def _alone(launcher: Launcher, root: str, report: Callable[[str], None]) -> AbstractContextManager[None]:
    """Keep two copies into one folder apart, which several hosts may share; what is not copied needs no such lock."""
    if launcher.shares_files:
        return nullcontext()
    return sole_writer(launcher.open_stream, f"{root}/{LOCK}", report)


def _deployed(launcher: Launcher, request: Mapping[str, Any], python: str) -> dict[str, Any] | None:
    """The receipt of an environment that is there, by an interpreter that may be there; None when it is not."""
    argv = ["sh", "-c", IF_IT_RUNS, "sh", *_installer(python, {**request, "action": "verify", "wait": False})]
    result = launcher.run_command(argv, timeout_s=VERIFY_TIMEOUT_S, stdin=PROGRAM.read_text())
    return _receipt(result.stdout)


def _install(
    launcher: Launcher,
    python: str,
    wheelhouse: Path,
    built: Manifest,
    request: Mapping[str, Any],
    report: Callable[[str], None],
) -> dict[str, Any]:
    folder, wheels = request["folder"], manifest.wheels_folder(wheelhouse)
    wheels_folder = str(wheels.resolve()) if launcher.shares_files else f"{folder}.wheels"
    if not launcher.shares_files:
        launcher.copy_in(wheels, wheels_folder, report)
    receipt = _on_target(
        launcher,
        python,
        {
            **request,
            "action": "install",
            "wheels_folder": wheels_folder,
            "remove_wheels": not launcher.shares_files,
            "wheels": [{"name": wheel.name, "file": wheel.file, "sha256": wheel.sha256} for wheel in built.wheels],
            "algorithm": ALGORITHM,
            "variables": engine_variables(built.engine, built.build),
            **_checks(built),
        },
        INSTALL_TIMEOUT_S,
        report,
    )
    if receipt is None:
        raise EnvironmentFailed(f"{folder}: the installer gave no receipt; remove the folder and deploy again")
    return receipt


def _checks(built: Manifest) -> dict[str, Any]:
    """What is imported in an environment, and how its server is asked for its options."""
    checks = CHECKS[built.engine]
    more = [module for wheel, module in OF_CPU_BUILDS.items() if wheel in built.versions]
    return {**checks, "imports": [*more, *checks["imports"]]}


def _release(wheelhouse: Path, built: Manifest) -> dict[str, Any]:
    """The release that the plugin in a wheelhouse is made for, and the sha256 of the files of it that it hooks."""
    (plugin,) = (wheel for wheel in built.wheels if wheel.name == "sglang-ddtree")
    with zipfile.ZipFile(manifest.wheels_folder(wheelhouse) / plugin.file) as archive:
        table = json.loads(archive.read(RELEASE_TABLE))
    return {"release": table["release"], "files": table["files"]}


def _interpreter(launcher: Launcher, adopt: str) -> str:
    result = launcher.run_command(["sh", "-c", AS_INTERPRETER, "sh", adopt], timeout_s=VERIFY_TIMEOUT_S)
    python = result.stdout.strip()
    tried = launcher.run_command(
        ["sh", "-c", '[ -x "$1" ] && exec "$1" -B -c ""', "sh", python], timeout_s=VERIFY_TIMEOUT_S
    )
    if tried.exit_code != 0:
        raise EnvironmentFailed(
            f"adopt: {adopt}: {python} is no Python that runs on the target; give the interpreter or the virtual "
            "environment in which SGLang is installed"
        )
    return python


def _on_target(
    launcher: Launcher, python: str, request: Mapping[str, Any], timeout_s: float, report: Callable[[str], None]
) -> dict[str, Any] | None:
    result = launcher.run_command(
        _installer(python, request),
        timeout_s=timeout_s,
        stdin=PROGRAM.read_text(),
        report=lambda line: report(line) if line and not line.startswith("{") and line != "null" else None,
    )
    if result.exit_code != 0:
        raise EnvironmentFailed(f"{request['folder']}: {request['action']} failed: {result.stderr.strip()}")
    return _receipt(result.stdout)


def _installer(python: str, request: Mapping[str, Any]) -> list[str]:
    # Compiled modules of an interpreter that is adopted would lie in its installation.
    return [python, "-B", "-", json.dumps(request)]


def _receipt(stdout: str) -> dict[str, Any] | None:
    receipt: dict[str, Any] | None = json.loads(stdout.splitlines()[-1])
    return receipt
