"""The name of a trained model: a digest of all that decides its weights. Needs nothing but the standard library."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

KINDS = ("plain", "mla_moe", "hybrid_gdn")
DEFAULT_BLOCK_SIZE = 8
DEFAULT_SEED = 0


class Identity(NamedTuple):
    """What a caller chooses; the digest adds the sources of this package."""

    kind: str
    block_size: int = DEFAULT_BLOCK_SIZE
    seed: int = DEFAULT_SEED


def digest(kind: str, block_size: int = DEFAULT_BLOCK_SIZE, seed: int = DEFAULT_SEED) -> str:
    """16 hex digits that name the model; they change with the choice and with any source file of this package.

    The same digest on another machine means the same recipe, not the same bits: the processor's vector width and
    torch's version decide the order of sums.

    Raises ValueError for a kind or block size that does not exist.
    """
    check(kind, block_size)
    summary = hashlib.sha256(json.dumps([kind, block_size, seed]).encode())
    package = Path(__file__).parent
    for source in sorted(package.rglob("*.py")):
        summary.update(f"\n{source.relative_to(package).as_posix()}\n".encode())
        summary.update(source.read_bytes())
    return summary.hexdigest()[:16]


def folder_name(identity: Identity) -> str:
    """The folder of a model below a cache, such as `plain-b8-s0-0123456789abcdef` (kind, block, seed, digest)."""
    return f"{identity.kind}-b{identity.block_size}-s{identity.seed}-{digest(*identity)}"


def check(kind: str, block_size: int) -> None:
    """Raise ValueError, with what is possible, for a kind or block size that does not exist."""
    if kind not in KINDS:
        raise ValueError(f"--kind {kind}: there is no such micro model; take one of {', '.join(KINDS)}")
    if not 2 <= block_size <= 32:
        raise ValueError(f"--block-size {block_size}: must be from 2 (one draft) to 32; the study's are 8, 10 and 16")
