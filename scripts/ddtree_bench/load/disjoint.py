"""Proof that sets of prompts share nothing: no equal text and no run of eight words.

A drafter that was trained on a prompt answers it with a longer accept length than it would any other, and a measured
prompt that was already sent in the warm-up may be served from the prefix cache.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WORDS = 8
"""Length of the shared run of words that counts as an overlap."""


@dataclass(frozen=True)
class Overlap:
    """A pair of texts that are not disjoint, and the words they share."""

    left: str
    right: str
    shared: str


def normalise(text: str) -> tuple[str, ...]:
    """Return the words of a text, compatibility-folded and in lower case; signs between words do not count."""
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def overlaps(left: Iterable[str], right: Iterable[str], words: int = WORDS) -> list[Overlap]:
    """Return every pair of texts, one of each side, that are equal or share a run of `words` words.

    Both are compared after `normalise`; texts shorter than `words` overlap when they are equal. A text of the left is
    reported with the first match of the right only.
    """
    index: dict[tuple[str, ...], str] = {}
    for text in right:
        for gram in _grams(text, words):
            index.setdefault(gram, text)
    found = []
    for text in left:
        shared = next((gram for gram in _grams(text, words) if gram in index), None)
        if shared is not None:
            found.append(Overlap(text, index[shared], " ".join(shared)))
    return found


def _grams(text: str, words: int) -> list[tuple[str, ...]]:
    """The runs of `words` words of a text, and the whole of it, so that short texts are compared too."""
    tokens = normalise(text)
    return [tokens, *(tokens[i : i + words] for i in range(len(tokens) - words + 1))]


def read_lines(path: str | Path) -> tuple[str, ...]:
    """Read a plain list of prompts, one a line, such as the drafter's training prompts."""
    return tuple(line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip())
