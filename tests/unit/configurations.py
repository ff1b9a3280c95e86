"""A small valid configuration and its prompt files, for tests to change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

TREE: dict[str, Any] = {
    "repeats": 2,
    "targets": {"local": {"launcher": "local", "engine": "reference"}},
    "models": {
        "toy": {"name": "toy", "revision": "1", "drafter": {"name": "toy-drafter", "revision": "1", "block_size": 8}}
    },
    "workloads": {"short": {"prompts": "prompts.jsonl", "n_min": 4, "max_tokens": 8}},
    "warmup": {"prompts": "warmup.jsonl"},
    "sweep": [
        {
            "target": "local",
            "model": "toy",
            "method": ["AR", "DFLASH", "DDTREE"],
            "budget": [4, 8],
            "topk_cap": 8,
            "workload": "short",
            "max_running_requests": 1,
        }
    ],
}

CATEGORIES = ("code", "explain", "arithmetic", "haiku")


def tree() -> dict[str, Any]:
    """Return a copy of the valid tree that a test may change."""
    return copy.deepcopy(TREE)


def write_prompts(path: Path, n_blocks: int = 4, word: str = "measured") -> Path:
    """Write a prompt file of `n_blocks` blocks of four categories."""
    lines = [
        {
            "id": f"{word}-{category}-{block}",
            "block": block,
            "category": category,
            "prompt": f"{word} {category} {block}",
        }
        for block in range(1, n_blocks + 1)
        for category in CATEGORIES
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_project(root: Path) -> Path:
    """Write the prompt files that the tree names."""
    write_prompts(root / "prompts.jsonl")
    write_prompts(root / "warmup.jsonl", 1, "warming")
    return root
