"""Files of which a reader sees the whole or nothing, and digests of what was written."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any) -> str:
    """Return JSON as it lies on disk: indented, keys in the order given, no NaN."""
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def sync(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write JSON at once: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(to_json(value), encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json_keeping_time(path: Path, value: Any) -> None:
    """Write a JSON file that is there anew, so that Snakemake does not see it."""
    before = path.stat()
    write_json(path, value)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    return dict(json.loads(path.read_text(encoding="utf-8")))
