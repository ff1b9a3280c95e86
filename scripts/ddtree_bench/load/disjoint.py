"""Proof that sets of prompts share nothing: no equal text, no run of eight words, no topic.

A drafter that was trained on a prompt answers it with a longer accept length than it would any other, and a measured
prompt that was already sent in the warm-up may be served from the prefix cache.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

WORDS = 8
"""Length of the shared run of words that counts as an overlap."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve ii iii iv vi vii viii ix")

_STOP_WORDS = _words(
    "a about all also an and any are as at be been but by can could did do does each every for from had has have how i "
    "if in into is it its just me my no not of on only or our s so some t than that the their them then there these "
    "they this to using was we were what when where which while who why will with would you your"
)

_TASK_WORDS = _words(
    "answer calculate child class code compute create define describe detail details difference example examples "
    "explain explanation fact facts find function functions generate give haiku implement important list make method "
    "paragraph poem program programs prompt python return returns sentence sentences short show simple steps step "
    "story task tell term terms theory word words work works write"
)
"""Words that say what is to be done and not about what: two prompts that differ in these alone are of one topic."""


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


def topic(text: str) -> frozenset[str]:
    """Return the content words of a text: no stop words, no words of the task and no numbers.

    >>> sorted(topic("Explain the theory of World War II to a child in 3 sentences"))
    ['war', 'world']
    """
    words = frozenset(word for word in normalise(text) if not word.isnumeric())
    return words - _STOP_WORDS - _TASK_WORDS - _NUMBERS


def topic_overlaps(left: Iterable[str], right: Iterable[str]) -> list[Overlap]:
    """Return every pair of texts, one of each side, of one topic.

    They are when their content words (`topic`) are the same, or those of one, at least two, are all in the other; in
    both cases one word may differ in one letter. This finds what `overlaps` cannot in short texts: 17*23 beside
    17*24, the causes of World War I beside World War II, a plural beside its singular. Texts of nothing but numbers and
    words of the task are of one topic. It does not know synonyms. A text of the left is reported with the first match
    of the right only.
    """
    topics = [(text, topic(text)) for text in right]
    found = []
    for text in left:
        words = topic(text)
        match = next(((other, theirs) for other, theirs in topics if _close(words, theirs)), None)
        if match is not None:
            found.append(Overlap(text, match[0], " ".join(sorted(words & match[1]))))
    return found


def _close(left: frozenset[str], right: frozenset[str]) -> bool:
    """Whether two sets are equal, or one of two words and more is part of the other, but for one letter of one word."""
    fewer, more = sorted((left, right), key=len)
    if len(fewer) < 2 and len(fewer) != len(more):
        return False
    missing = fewer - more
    if len(missing) == 1:
        (word,) = missing
        return any(one_letter_apart(word, other) for other in more - fewer)
    return not missing


def one_letter_apart(left: str, right: str) -> bool:
    """Return whether two words are equal, or are so after one letter is put in, taken out or changed."""
    short, long = sorted((left, right), key=len)
    same = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    return long[same + 1 :] in (short[same:], short[same + 1 :]) and len(long) - len(short) <= 1
