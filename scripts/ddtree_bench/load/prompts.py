"""Prompt files: reading, the choice of a cell's prompts, and the digests that say which work was done.

Read while Snakemake parses the workflow, so it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from ddtree_bench import keys

REQUESTS_PER_SLOT = 4
"""Requests measured for each request kept in flight: below that, ramp and tail outweigh the steady part."""

MOST_NESTED = 100
"""Levels of lists and objects in the messages of a prompt; no server takes more."""

_TOO_DEEP = f"lists and objects lie in each other more than {MOST_NESTED} deep; write them flatter"

_FIELDS = {"id": str, "block": int, "category": str, "prompt": str}


class PromptError(ValueError):
    """A prompt file or a choice of prompts that cannot be used; the message names file or key, value and remedy."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a prompt file: a text, or the messages of a chat, and then the text is empty.

    A block holds one prompt of each category.
    """

    id: str
    block: int
    category: str
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)

    @property
    def sha256(self) -> str:
        """Digest of the text in UTF-8, or of the messages' canonical JSON; 64 hex digits."""
        if self.messages is not None:
            return keys.digest(list(self.messages))
        return hashlib.sha256(self.text.encode()).hexdigest()


def read(path: str | Path) -> tuple[Prompt, ...]:
    """Read a JSONL prompt file, one `{"id", "block", "category", "prompt"}` a line, in its order.

    Raises PromptError for a file that is missing or empty, a line that is not such an object, an id or a text that
    occurs twice, and blocks that are not in ascending order.
    """
    prompts = tuple(
        _parse(record, where) for where, record in _records(Path(path), "name a file that exists in `prompts`")
    )
    _check_distinct(prompts, path, "id", "text")
    _check_order(prompts, path)
    return prompts


def read_plain(path: str | Path) -> tuple[Prompt, ...]:
    """Read a JSONL prompt file of any source, in its order.

    A line is `{"id", "prompt"}`, `{"id", "messages"}` or one of the workflow's own; other fields are ignored. An id is
    a text or an integer and becomes a text.

    Raises PromptError for a file that is missing or empty, a line that is neither, and an id that occurs twice.
    """
    prompts = tuple(_parse_plain(record, where) for where, record in _records(Path(path), "give one that exists"))
    _check_distinct(prompts, path, "id")
    return prompts


def _records(path: Path, remedy: str) -> Iterator[tuple[str, Any]]:
    """Yield what each line holds with the place where it stands. Raises PromptError."""
    try:
        # A file saved on Windows may begin with a byte order mark, which JSON does not allow.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise PromptError(f"prompt file {path}: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"prompt file {path}: is not UTF-8 ({error.reason}); save it as UTF-8") from error
    if not any(line.strip() for line in lines):
        raise PromptError(f"prompt file {path} holds no prompt; add at least one line")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", _loads(line, f"{path}:{number}")


def _loads(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not a line of JSON ({error.msg}); write one object a line") from error
    except RecursionError as error:
        raise PromptError(f"{where}: {_TOO_DEEP}") from error
    except ValueError as error:
        raise PromptError(f"{where}: cannot be read ({error}); write numbers that programs can hold") from error


def _parse(record: Any, where: str) -> Prompt:
    if not isinstance(record, dict) or set(record) != set(_FIELDS):
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise PromptError(f"{where}: found {found}; a prompt has exactly the fields {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        value = record[name]
        if type(value) is not kind or value == "":
            raise PromptError(f"{where}: {name} is {value!r}; give a non-empty {kind.__name__}")
    return Prompt(record["id"], record["block"], record["category"], record["prompt"])


def _parse_plain(record: Any, where: str) -> Prompt:
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise PromptError(f"{where}: found {found}; a line is an object with id and either prompt or messages")
    name, block, category = record.get("id"), record.get("block"), record.get("category")
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise PromptError(f"{where}: id is {name!r}; give a non-empty text or an integer, different in each line")
    text, messages = _content(record, where)
    block, category = block if type(block) is int else 1, category if isinstance(category, str) else ""
    prompt = Prompt(str(name), block, category, text, messages)
    if _deeper(messages, MOST_NESTED):
        raise PromptError(f"{where}: {_TOO_DEEP}")
    try:
        json.dumps([prompt.id, text, messages], ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise PromptError(f"{where}: cannot be sent as JSON in UTF-8 ({error}); mend the text") from error
    return prompt


def _content(record: Mapping[str, Any], where: str) -> tuple[str, tuple[Mapping[str, Any], ...] | None]:
    if "messages" in record:
        return "", _messages(record["messages"], where)
    text = record["prompt"]
    if not isinstance(text, str) or text == "":
        raise PromptError(f"{where}: prompt is {text!r}; give a non-empty text")
    return text, None


def _messages(given: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    messages = given if isinstance(given, list) else []
    if not messages or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
        raise PromptError(
            f"{where}: messages is not a list of objects with a role; write them as the chat API has them"
        )
    return tuple(messages)


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie in each other more than `levels` deep."""
    if not isinstance(value, list | tuple | dict):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(one, levels - 1) for one in inside)


def _check_distinct(prompts: Sequence[Prompt], path: str | Path, *fields: str) -> None:
    for what in fields:
        seen: dict[str, str] = {}
        for prompt in prompts:
            value = getattr(prompt, what)
            if value in seen:
                raise PromptError(f"{path}: the {what} {value!r} occurs twice ({seen[value]}, {prompt.id}); drop one")
            seen[value] = prompt.id


def _check_order(prompts: Sequence[Prompt], path: str | Path) -> None:
    for before, after in pairwise(prompts):
        if after.block < before.block:
            raise PromptError(f"{path}: block {after.block} ({after.id}) follows block {before.block}; sort by block")


def needed(n_min: int, concurrency: int) -> int:
    """Return how many prompts a cell takes: max(n_min, 4 * concurrency)."""
    return max(n_min, REQUESTS_PER_SLOT * concurrency)


def of_blocks(prompts: Sequence[Prompt], blocks: Collection[int] | None) -> list[Prompt]:
    """Return the prompts of some blocks, or all of them. Raises PromptError when a block does not exist."""
    if absent := sorted(set(blocks or ()) - {prompt.block for prompt in prompts}):
        raise PromptError(f"blocks: {absent} not in the prompt file; it has {_ranges(p.block for p in prompts)}")
    return [prompt for prompt in prompts if blocks is None or prompt.block in blocks]


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
    chosen = of_blocks(prompts, blocks)
    n = needed(n_min, concurrency)
    if n > len(chosen) and not (repeat_prompts and chosen):
        raise PromptError(
            f"concurrency: {concurrency} with n_min: {n_min} needs {n} prompts, and there are {len(chosen)}; "
            f"lower them, add prompts or blocks, or set repeat_prompts: true"
        )
    return tuple(islice(cycle(chosen), n if blocks is None else max(n, len(chosen))))


def take(prompts: Sequence[Prompt], n: int, repeat: bool = False) -> tuple[Prompt, ...]:
    """Return the first n prompts in the order of the list; with `repeat` a list that is too short starts over.

    Raises PromptError when there are too few and `repeat` is false.
    """
    if n > len(prompts) and not (repeat and prompts):
        raise PromptError(f"{n} requests and {len(prompts)} prompts; lower the number or let prompts repeat")
    return tuple(islice(cycle(prompts), n))


def _ranges(blocks: Iterable[int]) -> str:
    values = sorted(set(blocks))
    return f"{values[0]} to {values[-1]}" if values else "none"


def prompt_set_sha256(prompts: Iterable[Prompt]) -> str:
    """Return the digest of the prompts' texts (or messages) in order, 64 hex digits; ids, blocks and categories are no
    part of it.
    """
    return keys.digest([prompt.sha256 for prompt in prompts])
