"""The key of an engine's environment: pins, patches and our own source, known before anything is built.

Read while Snakemake parses, so it imports nothing heavy and reads nothing but these files.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from ddtree_bench import keys

FORMAT = 1
"""Raised when environments are built differently from the same files."""

PINS = {"reference": ("requirements.lock", "torch.in"), "sglang": ("requirements.in", "requirements.lock")}
"""The files of an engine's folder that pin what it runs on."""

PATCHES = "patches"
SOURCES = {"reference": ("pyproject.toml", "ddtree_reference"), "sglang": ("plugin",)}
"""What of an engine's folder becomes the wheel that we build ourselves."""

NOT_SOURCE_FOLDERS = frozenset({"__pycache__", "build", "dist", "docs", "tests"})
NOT_SOURCE_SUFFIXES = frozenset({".egg-info", ".md", ".pyc", ".rst"})


class EnvironmentFailed(RuntimeError):
    """An environment could not be built or deployed; the message names the file or package and the remedy."""


def environment_key(engine: str, engines_root: Path) -> str:
    """The digest of what `engines_root`/`engine` builds from, 64 hex digits; the same on every platform.

    It depends on names and contents of files, not on their times, caches or documentation. Raises
    EnvironmentFailed for an engine that does not exist.
    """
    folder = engine_folder(engine, engines_root)
    files = [folder / name for name in PINS[engine]]
    for name in (PATCHES, *SOURCES[engine]):
        files += source_files(folder / name)
    contents = {str(file.relative_to(folder)): sha256(file) for file in files if file.is_file()}
    return keys.digest({"format": FORMAT, "engine": engine, "files": contents})


def python_tag() -> str:
    """The tag of the running Python, such as cp311."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def engine_folder(engine: str, engines_root: Path) -> Path:
    """The folder of an engine; raises EnvironmentFailed for one that does not exist."""
    if engine not in SOURCES:
        raise EnvironmentFailed(f"engine: {engine!r} does not exist; engines: {', '.join(sorted(SOURCES))}")
    return engines_root / engine


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
