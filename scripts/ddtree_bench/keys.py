"""Canonical JSON and the digests made from it: the one place where identity becomes a name."""

from __future__ import annotations

import hashlib
import json
from typing import Any

PROTOCOL = 2
"""Raised when what a measurement does changes, so that older cells are not mistaken for new ones."""

SHORT = 12
"""Hex digits of a digest that are shown in paths; records hold all 64."""


def canonical(value: Any) -> str:
    """Return `value` as canonical JSON: sorted keys, no blanks, no NaN, plain types only.

    Raises TypeError for a type that JSON does not have (paths, numpy numbers, tuples are lists).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest(value: Any) -> str:
    """Return the sha256 of the canonical JSON of `value`, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def short(full: str) -> str:
    """Return the digits of a digest that are shown in paths."""
    return full[:SHORT]
