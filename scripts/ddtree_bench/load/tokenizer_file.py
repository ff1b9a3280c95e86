"""Where a tokenizer's file lies; apart from what reads it, since the configuration is checked at each start."""

from __future__ import annotations

from pathlib import Path

FILE = "tokenizer.json"


def file_of(path: Path) -> Path:
    """Return the file that a path means: the path itself, or the tokenizer.json of a folder."""
    return path / FILE if path.is_dir() else path
