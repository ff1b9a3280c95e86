"""The prompts a drafter is trained on, expanded from templates and topics, and kept apart from measured prompts."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

RUN = 8
"""Words in a row that a training prompt may not share with a measured one."""

_SLOT = re.compile(r"\{(\w+)(?:([*+-])(\w+))?\}")

_COMMON_WORDS = """
a about all also an and any are as at be been but by can could did do does each every for from had has have how i if
in into is it its just me my no not of on only or our s so some t than that the their them then there these they this
to using was we were what when where which while who why will with would you your answer calculate child class code
compute create define describe detail details difference example examples explain explanation fact facts find function
functions generate give haiku implement important list make method paragraph poem program programs prompt python
return returns sentence sentences short show simple steps step story task tell term terms theory word words work works
write zero one two three four five six seven eight nine ten eleven twelve ii iii iv vi vii viii ix
"""

_NOT_A_TOPIC = frozenset(_COMMON_WORDS.split())
"""Words of grammar, of the task and of number: two prompts that differ in these alone are about the same thing."""


@dataclass(frozen=True)
class Prompt:
    """A request of a user; `id` is unique in a list, `category` the file it comes from."""

    id: str
    category: str
    text: str


def expand(directory: Path, seed: int) -> list[Prompt]:
    """Return the distinct prompts that the files `CATEGORY.toml` of a directory make, the same for the same seed.

    A file holds `[[group]]` tables with either `topics` (one a line), `templates` (one a line, with `{topic}`) and
    `per_topic`, the number of templates drawn for a topic, the first always among them; or `problems` (one a line),
    `copies` of each, and what fills their slots: `numbers` (name to lowest and highest) and `words` (name to choices,
    one a line). A slot is `{name}` or, of two numbers, `{a*b}`, `{a+b}`, `{a-b}`.

    Any prefix of the list has all categories in proportion, and every topic of a category comes once before one comes
    again. Raises ValueError for a directory without files and for a group that lacks a key.
    """
    files = sorted(directory.glob("*.toml"))
    if not files:
        raise ValueError(f"{directory}: no prompt files (*.toml); give the directory that holds them")
    placed: list[tuple[float, str, str]] = []
    for file in files:
        texts = _distinct(_texts(file, Random(f"{seed}/{file.stem}")))
        placed += [((place + 0.5) / len(texts), file.stem, text) for place, text in enumerate(texts)]
    counts: Counter[str] = Counter()
    prompts = []
    for _, category, text in sorted(placed):
        counts[category] += 1
        prompts.append(Prompt(f"{category}-{counts[category]:05d}", category, text))
    return prompts


def _texts(file: Path, random: Random) -> list[str]:
    """All texts of a category: a shuffled round with one text of each topic, then the next round."""
    series = [texts for group in _groups(file) for texts in _series(file, group, random)]
    rounds: list[str] = []
    for index in range(max(map(len, series), default=0)):
        one_round = [texts[index] for texts in series if index < len(texts)]
        random.shuffle(one_round)
        rounds += one_round
    return rounds


def _groups(file: Path) -> list[dict[str, Any]]:
    try:
        groups = tomllib.loads(file.read_text(encoding="utf-8"))["group"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: not TOML ({error}); correct the line") from error
    except KeyError:
        raise ValueError(f"{file}: no [[group]]; add one with topics or problems") from None
    return list(groups)


def _series(file: Path, group: dict[str, Any], random: Random) -> Iterator[list[str]]:
    """For each topic or problem of a group, its texts."""
    try:
        if "problems" in group:
            words = {name: _lines(choices) for name, choices in group.get("words", {}).items()}
            for problem in _lines(group["problems"]):
                yield [_fill(problem, group["numbers"], words, random) for _ in range(group["copies"])]
        else:
            templates, per_topic = _lines(group["templates"]), group["per_topic"]
            if not 1 <= per_topic <= len(templates):
                raise ValueError(
                    f"{file}: per_topic = {per_topic}; choose 1 to {len(templates)}, the group's templates"
                )
            for topic in _lines(group["topics"]):
                drawn = [templates[0], *random.sample(templates[1:], per_topic - 1)]
                random.shuffle(drawn)
                yield [template.replace("{topic}", topic) for template in drawn]
    except KeyError as missing:
        raise ValueError(f"{file}: a group has no {missing}; add it or correct the slot of that name") from None


def _lines(block: str) -> list[str]:
    return [line.strip() for line in block.splitlines() if line.strip()]


def _fill(problem: str, numbers: dict[str, list[int]], words: dict[str, list[str]], random: Random) -> str:
    """A problem with its slots filled; a slot of one name has one value throughout."""
    values: dict[str, str] = {}

    def value(name: str) -> str:
        if name not in values:
            taken = set(values.values())
            if name in words:
                values[name] = random.choice([choice for choice in words[name] if choice not in taken])
            else:
                values[name] = str(random.randint(*numbers[name]))
        return values[name]

    def slot(match: re.Match[str]) -> str:
        left, sign, right = match.groups()
        if sign is None:
            return value(left)
        one, other = int(value(left)), int(value(right))
        return str({"*": one * other, "+": one + other, "-": one - other}[sign])

    return _SLOT.sub(slot, problem)


def _distinct(texts: Iterable[str]) -> list[str]:
    """Texts without those that have the words of an earlier one."""
    return list({_words(text): text for text in reversed(list(texts))}.values())[::-1]


def exclude(prompts: Iterable[Prompt], others: Iterable[str]) -> list[Prompt]:
    """Return the prompts that share neither a run of `RUN` words, nor all their words, nor the topic with another text.

    The topic is the set of content words. Two topics are the same if they are equal, or if one of two words or more is
    part of the other; in both cases one word may differ in one letter. A text of numbers alone has the empty topic.
    """
    texts = [_words(other) for other in others]
    runs = {run for words in texts for run in _runs(words)}
    topics = {_topic(words) for words in texts}
    known: dict[frozenset[str], bool] = {}
    kept = []
    for prompt in prompts:
        words = _words(prompt.text)
        mine = _topic(words)
        if mine not in known:
            known[mine] = any(_same_topic(mine, theirs) for theirs in topics)
        if not known[mine] and runs.isdisjoint(_runs(words)):
            kept.append(prompt)
    return kept


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def _runs(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words, *(words[start : start + RUN] for start in range(len(words) - RUN + 1))}


def _topic(words: tuple[str, ...]) -> frozenset[str]:
    return frozenset(word for word in words if not word.isnumeric()) - _NOT_A_TOPIC


def _same_topic(one: frozenset[str], other: frozenset[str]) -> bool:
    if len(one) != len(other) and min(len(one), len(other)) < 2:
        return False
    small, large = (one, other) if len(one) <= len(other) else (other, one)
    left_over = list(small - large)
    if not left_over:
        return True
    return len(left_over) == 1 and any(_one_edit(left_over[0], word) for word in large - small)


def _one_edit(one: str, other: str) -> bool:
    """Whether one letter put in, taken out or changed makes one word of the other."""
    if abs(len(one) - len(other)) > 1:
        return False
    cuts = range(max(len(one), len(other)))
    return any(
        one[at + 1 :] == other[at + 1 :] or one[at:] == other[at + 1 :] or one[at + 1 :] == other[at:]
        for at in cuts
        if one[:at] == other[:at]
    )
