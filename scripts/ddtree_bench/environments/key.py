"""The key of an engine's environment: pins, patches and our own source, known before anything is built.

Read while Snakemake parses, so it imports nothing heavy and reads nothing but these files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ddtree_bench import keys
from ddtree_bench.environments.recipes import Environment, recipe_of

FORMAT = 1
"""Raised when environments are built differently from the same files."""

PATCHES = "patches"
NOT_SOURCE_FOLDERS = frozenset({"__pycache__", "build", "dist", "docs", "tests"})
NOT_SOURCE_SUFFIXES = frozenset({".egg-info", ".md", ".pyc", ".rst"})


def environment_key(environment: Environment, engines_root: Path) -> str:
    """The digest of what an environment is built from below `engines_root`, 64 hex digits; the same on every platform.

    It depends on names and contents of files, not on their times, caches or documentation. Raises
    EnvironmentFailed for an engine or a build that does not exist.
    """
    recipe, folder = recipe_of(environment), engines_root / environment.engine
    files = [folder / name for name in recipe.pins]
    for name in (PATCHES, *recipe.sources):
        files += source_files(folder / name)
    contents = {str(file.relative_to(folder)): sha256(file) for file in files if file.is_file()}
    built = {"build": environment.build} if environment.build else {}
    return keys.digest({"format": FORMAT, "engine": environment.engine, **built, "files": contents})


def patches_of(engine_folder: Path) -> list[Path]:
    """The patches in the folder of an engine, in the order in which they are applied."""
    return [path for path in source_files(engine_folder / PATCHES) if path.suffix == ".patch"]


def source_files(path: Path) -> Iterator[Path]:
    """The files below `path` that are source: no caches, documentation, tests or hidden files; `path` may be a file."""
    if path.name.startswith(".") or path.suffix in NOT_SOURCE_SUFFIXES or path.name in NOT_SOURCE_FOLDERS:
        return
    if path.is_dir():
        for child in sorted(path.iterdir()):
            yield from source_files(child)
    elif path.is_file():
        yield path


def sha256(path: Path) -> str:
    """The sha256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
