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
    environment_key,
    patches_of,
    sha256,
    source_files,
)
from ddtree_bench.environments.manifest import Manifest, Wheel
from ddtree_bench.environments.recipes import (
    Environment,
    EnvironmentFailed,
    Recipe,
    is_adopted,
    missing_wheels,
    python_tag,
    recipe_of,
    wheels_tag,
)
from ddtree_bench.environments.wheel_patch import patched_wheel
from ddtree_bench.targets import commands

PIP_TIMEOUT_S = 3600.0
SOURCE_DATE_EPOCH = "1577836800"
"""Time stamp inside the wheels that we build, so that the same source gives the same bytes."""

Report = Callable[[str], None]


def build(environment: Environment, engines_root: Path, folder: Path, report: Report = print) -> Manifest:
    """Make `folder` the wheelhouse of an environment and return its manifest; does nothing when it is that already.

    The wheels of the lock come by hash; torch, where it differs by platform, by version with what its build needs;
    our own packages are built from the engine's folder in `engines_root`, and the engine's patches are applied to its
    wheel. The manifest is written last; one process builds a folder at a time. Raises EnvironmentFailed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_alone(environment, engines_root, folder, report)


def _build_alone(environment: Environment, engines_root: Path, folder: Path, report: Report) -> Manifest:
    recipe, source = recipe_of(environment), engines_root / environment.engine
    key = environment_key(environment, engines_root)
    if (folder / manifest.NAME).exists():
        found, problems = _verified(folder, environment, key)
        if found is not None:
            report(f"{folder}: already built, {len(found.wheels)} wheels verified")
            return found
        report(f"{folder}: building again: {'; '.join(problems)}")
    _check_possible(environment, recipe, source)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as scratch:
        wheels = _collect_wheels(recipe, source, Path(scratch), report)
        _replace(wheels, manifest.wheels_folder(folder))
    built = Manifest(
        engine=environment.engine,
        build=environment.build,
        key=key,
        python=wheels_tag(environment),
        platform=sysconfig.get_platform(),
        wheels=tuple(Wheel.of(path) for path in sorted(manifest.wheels_folder(folder).glob("*.whl"))),
        patches=_digests(source, (PATCHES,)),
        sources=_digests(source, (*recipe.pins, *recipe.sources)),
    )
    built.write(folder)
    report(f"{folder}: built, {len(built.wheels)} wheels")
    return built


def _check_possible(environment: Environment, recipe: Recipe, source: Path) -> None:
    for name in (*recipe.pins, *(f"{project}/pyproject.toml" for project in recipe.projects)):
        if not (source / name).is_file():
            raise EnvironmentFailed(f"{source / name}: is missing, so {environment} cannot be built")
    missing = missing_wheels(environment, python_tag(), sysconfig.get_platform())
    if missing:
        raise EnvironmentFailed(f"{environment}: {missing}")
    patches = patches_of(source)
    if is_adopted(environment) and patches:
        raise EnvironmentFailed(
            f"{patches[0]}: an installation that is there already does not have it; take `adopt` out of the target, so "
            "that SGLang is installed with the patch"
        )


def _verified(folder: Path, environment: Environment, key: str) -> tuple[Manifest | None, list[str]]:
    """The manifest of a wheelhouse that is complete and the one wanted, or why it is not."""
    try:
        found = manifest.read(folder)
    except EnvironmentFailed as error:
        return None, [str(error)]
    problems = found.problems(folder, environment, key)
    return (None if problems else found), problems


def _collect_wheels(recipe: Recipe, source: Path, scratch: Path, report: Report) -> Path:
    wheels = scratch / "wheels"
    wheels.mkdir()
    download = ["download", "--dest", str(wheels), "--only-binary", ":all:"]
    if recipe.lock is not None:
        lock = source / recipe.lock
        _pip([*download, "--require-hashes", "--no-deps", "--requirement", str(lock)], str(lock), report)
        if recipe.torch is not None:
            torch, pins = source / recipe.torch, scratch / "constraints.txt"
            pins.write_text("\n".join(pinned(lock)))
            _pip([*download, "--requirement", str(torch), "--constraint", str(pins)], str(torch), report)
    if recipe.patched is not None:
        _apply_patches(recipe.patched, patches_of(source), wheels, report)
    build_options = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(wheels)]
    for project in recipe.projects:
        own = _copy_own_package(source / project, scratch / "source" / project)
        _pip([*build_options, str(own)], f"{source / project}, our own package,", report)
    return wheels


def _apply_patches(distribution: str, patches: Sequence[Path], wheels: Path, report: Report) -> None:
    """Put the patched wheel of a distribution in the place of the one that came from the index."""
    if not patches:
        return
    (wheel,) = wheels.glob(f"{distribution}-[0-9]*.whl")
    report(f"applying {len(patches)} patches to {wheel.name}")
    patched_wheel(wheel, patches, wheels)
    wheel.unlink()


def pinned(lock: Path) -> list[str]:
    """The requirements of a lock without their hashes, markers included."""
    lines = (line.rstrip("\\\n ") for line in lock.read_text().splitlines())
    return [line for line in lines if "==" in line and not line.startswith((" ", "#", "-"))]


def _copy_own_package(project: Path, destination: Path) -> Path:
    """Copy a project of ours aside, so that building it leaves nothing in the repository; returns the copy."""
    ignored = shutil.ignore_patterns(*NOT_SOURCE_FOLDERS, "*.egg-info", ".*")
    shutil.copytree(project, destination, ignore=ignored)
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
