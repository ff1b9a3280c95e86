"""The state of a training on disk: always whole, whatever ends the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

NAME = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Put a checkpoint in the place of the last one."""
    unfinished = folder / f"{NAME}.tmp"
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / NAME)


def load(folder: Path) -> dict[str, Any] | None:
    """The checkpoint in `folder`, None if there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state
