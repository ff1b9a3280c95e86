"""Build an engine's environment: a folder with every wheel it needs, and a manifest of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ddtree_bench.environments import manifest
from ddtree_bench.environments.key import (
    NOT_SOURCE_FOLDERS,
    PATCHES,
    PINS,
    SOURCES,
    EnvironmentFailed,
    engine_folder,
    environment_key,
    python_tag,
    sha256,
    source_files,
)
from ddtree_bench.environments.manifest import Manifest, Wheel
from ddtree_bench.targets import commands

PIP_TIMEOUT_S = 3600.0
SOURCE_DATE_EPOCH = "1577836800"
"""Time stamp inside the wheels that we build, so that the same source gives the same bytes."""

Report = Callable[[str], None]


def build(engine: str, engines_root: Path, folder: Path, report: Report = print) -> Manifest:
    """Make `folder` the wheelhouse of an engine and return its manifest; does nothing when it is that already.

    The wheels of the lock come by hash; torch, which differs by platform, by version with what its build needs;
    our own package is built from `engines_root`/`engine`. The manifest is written last; one process builds a folder at
    a time. Raises EnvironmentFailed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_alone(engine, engines_root, folder, report)


def _build_alone(engine: str, engines_root: Path, folder: Path, report: Report) -> Manifest:
    key = environment_key(engine, engines_root)
    source = engine_folder(engine, engines_root)
    if (folder / manifest.NAME).exists():
        found, problems = _verified(folder, engine, key)
        if found is not None:
            report(f"{folder}: already built, {len(found.wheels)} wheels verified")
            return found
        report(f"{folder}: building again: {'; '.join(problems)}")
    for name in PINS[engine]:
        if not (source / name).is_file():
            raise EnvironmentFailed(f"{source / name}: is missing, so the {engine} engine cannot be built")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as scratch:
        wheels = _collect_wheels(engine, source, Path(scratch), report)
        _replace(wheels, manifest.wheels_folder(folder))
    built = Manifest(
        engine=engine,
        key=key,
        python=python_tag(),
        platform=sysconfig.get_platform(),
        wheels=tuple(Wheel.of(path) for path in sorted(manifest.wheels_folder(folder).glob("*.whl"))),
        patches=_digests(source, (PATCHES,)),
        sources=_digests(source, (*PINS[engine], *SOURCES[engine])),
    )
    built.write(folder)
    report(f"{folder}: built, {len(built.wheels)} wheels")
    return built


def _verified(folder: Path, engine: str, key: str) -> tuple[Manifest | None, list[str]]:
    """The manifest of a wheelhouse that is complete and the one wanted, or why it is not."""
    try:
        found = manifest.read(folder)
    except EnvironmentFailed as error:
        return None, [str(error)]
    problems = found.problems(folder, engine, key)
    return (None if problems else found), problems


def _collect_wheels(engine: str, source: Path, scratch: Path, report: Report) -> Path:
    wheels = scratch / "wheels"
    lock, torch = source / "requirements.lock", source / "torch.in"
    download = ["download", "--dest", str(wheels), "--only-binary", ":all:"]
    _pip([*download, "--require-hashes", "--no-deps", "--requirement", str(lock)], str(lock), report)
    pins = scratch / "constraints.txt"
    pins.write_text("\n".join(pinned(lock)))
    _pip([*download, "--requirement", str(torch), "--constraint", str(pins)], str(torch), report)
    own = _copy_own_package(engine, source, scratch / "source")
    build_options = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(wheels)]
    _pip([*build_options, str(own)], f"{source}, our own package,", report)
    return wheels


def pinned(lock: Path) -> list[str]:
    """The requirements of a lock without their hashes, markers included."""
    lines = (line.rstrip("\\\n ") for line in lock.read_text().splitlines())
    return [line for line in lines if "==" in line and not line.startswith((" ", "#", "-"))]


def _copy_own_package(engine: str, source: Path, destination: Path) -> Path:
    """Copy the package's source aside, so that building it leaves nothing in the repository; returns its project."""
    if engine == "sglang":
        source = source / SOURCES[engine][0]
    ignored = shutil.ignore_patterns(*NOT_SOURCE_FOLDERS, "*.egg-info", ".*")
    shutil.copytree(source, destination, ignore=ignored)
    return destination


def _pip(arguments: Sequence[str], what: str, report: Report) -> None:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    if arguments[0] == "download":
        argv += ["--progress-bar", "off"]
    env = {**os.environ, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    result = commands.run(argv, timeout_s=PIP_TIMEOUT_S, report=lambda line: _show_progress(line, report), env=env)
    if result.exit_code != 0:
        said = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        raise EnvironmentFailed(
            f"{what}: pip {arguments[0]} failed: {' '.join(said[-3:])}\n"
            "Connect to the package index, or put the missing wheels into a folder and set PIP_FIND_LINKS to it"
        )


def _show_progress(line: str, report: Report) -> None:
    """Report what of pip's talk takes time or went wrong."""
    if line.lstrip().startswith(("Downloading", "Building wheel", "ERROR", "WARNING: Retrying")):
        report(line.strip())


def _replace(source: Path, destination: Path) -> None:
    if destination.exists():
        shutil.rmtree(destination)
    source.rename(destination)


def _digests(source: Path, names: Sequence[str]) -> dict[str, str]:
    files = [file for name in names for file in source_files(source / name)]
    return {str(file.relative_to(source)): sha256(file) for file in files}
