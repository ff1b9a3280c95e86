"""Prompt files: reading, the choice of a cell's prompts, and the digests that say which work was done.

Read while Snakemake parses the workflow, so it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from ddtree_bench import keys

REQUESTS_PER_SLOT = 4
"""Requests measured for each request kept in flight: below that, ramp and tail outweigh the steady part."""

_FIELDS = {"id": str, "block": int, "category": str, "prompt": str}


class PromptError(ValueError):
    """A prompt file or a choice of prompts that cannot be used; the message names file or key, value and remedy."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a prompt file. A block holds one prompt of each category."""

    id: str
    block: int
    category: str
    text: str

    @property
    def sha256(self) -> str:
        """Digest of the text in UTF-8, 64 hex digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read(path: str | Path) -> tuple[Prompt, ...]:
    """Read a JSONL prompt file, one `{"id", "block", "category", "prompt"}` a line, in its order.

    Raises PromptError for a file that is missing or empty, a line that is not such an object, an id or a text that
    occurs twice, and blocks that are not in ascending order.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PromptError(f"prompt file {path}: {error.strerror}; name a file that exists in `prompts`") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"prompt file {path}: is not UTF-8 ({error.reason}); save it as UTF-8") from error
    prompts = tuple(_parse(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise PromptError(f"prompt file {path} holds no prompt; add at least one line")
    _check_order(prompts, path)
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not a line of JSON ({error.msg}); write one object a line") from error
    if not isinstance(record, dict) or set(record) != set(_FIELDS):
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise PromptError(f"{where}: found {found}; a prompt has exactly the fields {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        value = record[name]
        if type(value) is not kind or value == "":
            raise PromptError(f"{where}: {name} is {value!r}; give a non-empty {kind.__name__}")
    return Prompt(record["id"], record["block"], record["category"], record["prompt"])


def _check_order(prompts: Sequence[Prompt], path: Path) -> None:
    for what in ("id", "text"):
        seen: dict[str, str] = {}
        for prompt in prompts:
            value = getattr(prompt, what)
            if value in seen:
                raise PromptError(f"{path}: the {what} {value!r} occurs twice ({seen[value]}, {prompt.id}); drop one")
            seen[value] = prompt.id
    for before, after in pairwise(prompts):
        if after.block < before.block:
            raise PromptError(f"{path}: block {after.block} ({after.id}) follows block {before.block}; sort by block")


def needed(n_min: int, concurrency: int) -> int:
    """Return how many prompts a cell takes: max(n_min, 4 * concurrency)."""
    return max(n_min, REQUESTS_PER_SLOT * concurrency)


def select(
    prompts: Sequence[Prompt],
    blocks: Collection[int] | None,
    n_min: int,
    concurrency: int,
    repeat_prompts: bool = False,
) -> tuple[Prompt, ...]:
    """Return the prompts of one cell, in the order of the list.

    Without `blocks` these are the first `needed(n_min, concurrency)`: every cell starts at the head of one list, so
    that cells of one concurrency do the same work and those of different concurrency share a prefix. With `blocks` they
    are all prompts of these blocks, at every concurrency. With `repeat_prompts` a list that is too short starts over.

    Raises PromptError when a block does not exist or there are too few prompts and `repeat_prompts` is false.
    """
    chosen = [prompt for prompt in prompts if blocks is None or prompt.block in blocks]
    absent = sorted(set(blocks or ()) - {prompt.block for prompt in prompts})
    if absent:
        raise PromptError(f"blocks: {absent} not in the prompt file; it has {_ranges(p.block for p in prompts)}")
    n = needed(n_min, concurrency)
    if n > len(chosen) and not (repeat_prompts and chosen):
        raise PromptError(
            f"concurrency: {concurrency} with n_min: {n_min} needs {n} prompts, and there are {len(chosen)}; "
            f"lower them, add prompts or blocks, or set repeat_prompts: true"
        )
    return tuple(islice(cycle(chosen), n if blocks is None else max(n, len(chosen))))


def _ranges(blocks: Iterable[int]) -> str:
    values = sorted(set(blocks))
    return f"{values[0]} to {values[-1]}" if values else "none"


def prompt_set_sha256(prompts: Iterable[Prompt]) -> str:
    """Return the digest of the prompts' texts in order, 64 hex digits; ids, blocks and categories are no part of it."""
    return keys.digest([prompt.sha256 for prompt in prompts])
