"""This package as one archive, from which its programs run on a host that has a Python and nothing else of ours."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from pathlib import Path

import ddtree_bench

PACKAGE = Path(ddtree_bench.__file__).parent
NAME = re.compile(r"ddtree_bench-[0-9a-f]{12}\.zip")
OLDEST = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive, so that equal contents make equal archives: the first that zip can say."""


def archive(folder: Path) -> Path:
    """Put the package into an archive in `folder`, named after its content, unless it is there already.

    The modules lie below `ddtree_bench/`: with the archive on its search path Python imports them as they are here.
    """
    contents = [(path.relative_to(PACKAGE.parent).as_posix(), path.read_bytes()) for path in _files()]
    digest = hashlib.sha256()
    for name, content in contents:
        digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
    path = folder / f"ddtree_bench-{digest.hexdigest()[:12]}.zip"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{path.name}.{os.getpid()}"
        _write(partial, contents)
        partial.replace(path)
    return path


def command(python: str, archive: str, module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command line, and the variables it needs, that run a module of the archive at a path on the host.

    Nothing of the folder in which it is started, nor of the user's own packages, is imported.
    """
    variables = {"PYTHONPATH": archive, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
    return [python, "-m", module, *arguments], variables


def command_line(python: str, archive: str, module: str, *arguments: str) -> list[str]:
    """The same as one command line, for where variables cannot be given beside it."""
    argv, variables = command(python, archive, module, *arguments)
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *argv]


def _files() -> list[Path]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return sorted(files, key=lambda path: path.relative_to(PACKAGE).as_posix())


def _write(path: Path, contents: list[tuple[str, bytes]]) -> None:
    # Stored, not compressed: another zlib would make other bytes.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, content in contents:
            entry = zipfile.ZipInfo(name, OLDEST)
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            file.writestr(entry, content)
