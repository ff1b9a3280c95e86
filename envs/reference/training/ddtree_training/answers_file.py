"""The target's answers as JSON lines: read, and appended to as they finish."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """A prompt, as text and as the token ids the target read, and the token ids of the target's greedy answer."""

    id: str
    category: str
    prompt: str
    prompt_tokens: Sequence[int]
    answer_tokens: Sequence[int]


def read(path: Path) -> list[Answer]:
    """All answers, in the file's order; none if there is no file. A last line without newline, which a killed writer
    left, is left out.

    Raises ValueError that names the line that is no answer.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]  # what follows the last newline is unfinished
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Answer], None]]:
    """Open the file to write behind what is there, an unfinished last line cut off; made if there is none.

    Yields the function that writes an answer; once it returns, the end of this process does not lose the answer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    _cut_unfinished(path)
    with path.open("a", encoding="utf-8") as file:

        def append(answer: Answer) -> None:
            file.write(_line(answer))
            file.flush()

        yield append


def replace(path: Path, answers: Iterable[Answer]) -> None:
    """Write a file of just these answers in the place of what is there, in one step."""
    part = path.with_name(path.name + ".tmp")
    part.write_text("".join(_line(answer) for answer in answers), encoding="utf-8")
    part.replace(path)


def digest(answers: Iterable[Answer]) -> str:
    """SHA-256 in hex of answers and their order."""
    hasher = hashlib.sha256()
    for answer in answers:
        hasher.update(json.dumps(asdict(answer), sort_keys=True).encode() + b"\n")
    return hasher.hexdigest()


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer), ensure_ascii=False) + "\n"


def _parse(path: Path, number: int, line: str) -> Answer:
    try:
        entry = json.loads(line)
        return Answer(
            id=str(entry["id"]),
            category=str(entry["category"]),
            prompt=str(entry["prompt"]),
            prompt_tokens=tuple(map(int, entry["prompt_tokens"])),
            answer_tokens=tuple(map(int, entry["answer_tokens"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}:{number}: not an answer ({type(error).__name__}: {error}); remove the line, and generating "
            "answers again fills the gap"
        ) from None


def _cut_unfinished(path: Path) -> None:
    """Cut a last line that lacks its newline, reading backwards no further than that line."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        block = 65_536
        position = end
        while position > 0:
            start = max(0, position - block)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
