"""A list of prompts as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ddtree_training.prompts import Prompt


def write(prompts: Iterable[Prompt], path: Path) -> None:
    """Write {"id", "category", "prompt"} lines; the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".tmp")
    entries = ({"id": prompt.id, "category": prompt.category, "prompt": prompt.text} for prompt in prompts)
    part.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")
    part.replace(path)


def read(path: Path) -> list[Prompt]:
    """The prompts of a file that `write` made."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prompt(entry["id"], entry["category"], entry["prompt"]) for entry in entries]
