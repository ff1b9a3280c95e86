"""What the model files of this machine hold, told apart by their sizes, headers and samples. Standard library only."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MIB = 2**20
WHOLE_FILE = 64 * MIB
"""Files up to this size are read whole; of larger ones the header and samples at even distances."""

SAMPLE = 64 * 1024
SAMPLES = 32
READERS = 8
"""Files that are read at once when all of each is: one reader does not reach what a disk gives."""

WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
CONFIG_FILES = {"config.json", "generation_config.json", "quantize_config.json", "hf_quant_config.json"}


def model_facts(path: Path, full: bool = False) -> dict[str, Any]:
    """Return the fingerprint of a model's file, or of a folder's configuration and weight files; path and files too.

    `full` adds the sha256 of the whole content of every file below the path, by name. Raises SystemExit for a folder
    that is no model.
    """
    if path.is_dir():
        files = [f for f in path.iterdir() if f.name in CONFIG_FILES or f.suffix in WEIGHT_SUFFIXES]
    else:
        files = [path]
    if not files:
        raise SystemExit(f"model folder {path}: has neither config.json nor weight files")
    parts = [_part(f) for f in sorted(files)]
    content = [[part["name"], part["bytes"], part["sha256"]] for part in parts] if path.is_dir() else parts[0]["sha256"]
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    facts = {"fingerprint": fingerprint, "path": str(path), "files": parts}
    return {**facts, "full_sha256": full_digests(path)} if full else facts


def _part(path: Path) -> dict[str, Any]:
    status = path.stat()
    modified = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="milliseconds")
    return {"name": path.name, "bytes": status.st_size, "modified": modified, "sha256": file_digest(path)}


def full_digests(path: Path) -> dict[str, str]:
    """Return the sha256 of the whole content of a file, or of every file below a folder, by name."""
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    folder = path if path.is_dir() else path.parent
    with ThreadPoolExecutor(READERS) as readers:
        digests = readers.map(_full_digest, files)
        return {f.relative_to(folder).as_posix(): digest for f, digest in zip(files, digests, strict=True)}


def _full_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content; of one above 64 MiB: its size, its header and 32 samples of 64 KiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_FILE:
            digest.update(file.read())
            return digest.hexdigest()
        digest.update(file.read(header_bytes(path)))
        for index in range(SAMPLES):
            file.seek((size - SAMPLE) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def header_bytes(path: Path) -> int:
    """Return the length of the header: what a safetensors file says of itself, 1 MiB elsewhere."""
    if path.suffix != ".safetensors":
        return MIB
    with path.open("rb") as file:
        return min(8 + int.from_bytes(file.read(8), "little"), 64 * MIB)
