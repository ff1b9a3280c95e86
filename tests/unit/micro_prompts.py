"""The prompts of the micro models, made from their toy language: `python tests/unit/micro_prompts.py` writes the files.

A prompt is the beginning of an answer, since a greedy answer to a question hardly depends on it: the language's next
word follows from the last two.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "config" / "prompts"
CATEGORIES = ("one", "two", "three", "four")
"""Whole sentences before the one that breaks off."""


def language() -> ModuleType:
    """The module with the toy language; it needs the standard library alone."""
    path = ROOT / "envs" / "sglang" / "micro_models" / "sglang_micro_models" / "language.py"
    spec = importlib.util.spec_from_file_location("micro_language", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(prefix: str, blocks: int, seed: str, taken: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """`blocks` x 4 prompts of the language, none of `taken`."""
    toy = language()
    grammar, source = toy.make_grammar(0), random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    for block in range(1, blocks + 1):
        for sentences, category in enumerate(CATEGORIES, start=1):
            text = beginning(toy, grammar, source, sentences)
            while text in found or text in taken:
                text = beginning(toy, grammar, source, sentences)
            found[text] = {"id": f"{prefix}-{category}-{block}", "block": block, "category": category, "prompt": text}
    return list(found.values())


def beginning(toy: ModuleType, grammar: Any, source: random.Random, sentences: int) -> str:
    """Whole sentences of one answer and the first two words of the next."""
    parts: list[str] = []
    while len(parts) <= sentences:
        parts = toy.answer(grammar, source).split(". ")
    whole, broken = parts[:sentences], parts[sentences].split(" ")[:2]
    return ". ".join([*whole, " ".join(broken)])


def files() -> dict[Path, str]:
    """Path and content of both files: the measured prompts, and those of the warm-up."""
    measured = made("micro", 8, "measured")
    warmup = made("micro-warmup", 2, "warm-up", frozenset(one["prompt"] for one in measured))
    return {
        PROMPTS / f"{name}.jsonl": "".join(json.dumps(one) + "\n" for one in found)
        for name, found in (("micro", measured), ("micro-warmup", warmup))
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
