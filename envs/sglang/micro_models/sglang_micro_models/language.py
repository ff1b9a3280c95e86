"""The toy language: sentences of three words whose odds depend on the two words before.

Every word is two or three syllables (consonant and vowel: one token each). Words of a class share first syllables in
pairs, so text branches inside words as well as between them, and what follows a branch differs between siblings.
"""

from __future__ import annotations

import random
from typing import NamedTuple

CONSONANTS = "bdfgklmnrst"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)
CLASSES = 3  # subject, verb, object
WORDS_PER_CLASS = 6
RANK_WEIGHTS = (0.82, 0.10, 0.05, 0.01, 0.01, 0.01)  # odds of a word by its rank after two given words
CLOSING_WORDS = 1  # objects after which an answer likes to end
END_AFTER_CLOSING, END_ELSEWHERE = 0.45, 0.02


class Grammar(NamedTuple):
    """`words[c]` are the words of class c; `order[c][i][j]` the words of class c from the likeliest to the least
    likely, as indices, after word j of the class before and word i of the class before that."""

    words: tuple[tuple[str, ...], ...]
    order: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


def make_grammar(seed: int) -> Grammar:
    """The grammar of a seed."""
    source = random.Random(f"grammar {seed}")
    return Grammar(_words(source), tuple(_order(source) for _ in range(CLASSES)))


def _order(source: random.Random) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The order of one class's words: after a given last word, each word is the likeliest after one word before that.

    So the likeliest continuations form long cycles over all pairs of words, and greedy text does not get stuck.
    """
    everyone = range(WORDS_PER_CLASS)
    likeliest = [source.sample(everyone, WORDS_PER_CLASS) for _ in everyone]  # [last][before]
    return tuple(
        tuple((top, *source.sample([w for w in everyone if w != top], WORDS_PER_CLASS - 1)) for top in tops)
        for tops in zip(*likeliest, strict=True)
    )


def _words(source: random.Random) -> tuple[tuple[str, ...], ...]:
    firsts = source.sample(SYLLABLES, CLASSES * WORDS_PER_CLASS // 2)
    classes = []
    for c in range(CLASSES):
        words = []
        for first in firsts[c * WORDS_PER_CLASS // 2 : (c + 1) * WORDS_PER_CLASS // 2]:
            for second in source.sample(SYLLABLES, 2):
                words.append(first + second + (source.choice(SYLLABLES) if source.random() < 0.3 else ""))
        classes.append(tuple(words))
    return tuple(classes)


def answer(grammar: Grammar, source: random.Random, max_sentences: int = 40) -> str:
    """A text of sentences, separated by spaces, that ends where the language ends it."""
    before, last = source.randrange(WORDS_PER_CLASS), source.randrange(WORDS_PER_CLASS)
    sentences = []
    for _ in range(max_sentences):
        sentence = []
        for c in range(CLASSES):
            rank = source.choices(range(WORDS_PER_CLASS), RANK_WEIGHTS)[0]
            before, last = last, grammar.order[c][before][last][rank]
            sentence.append(grammar.words[c][last])
        sentences.append(" ".join(sentence) + ".")
        if source.random() < (END_AFTER_CLOSING if last < CLOSING_WORDS else END_ELSEWHERE):
            break
    return " ".join(sentences)


def question(grammar: Grammar, source: random.Random) -> str:
    """What a user says: a few words of the language, or letters and signs at random as any other text would be."""
    if source.random() < 0.6:
        return " ".join(source.choice(source.choice(grammar.words)) for _ in range(source.randint(1, 6)))
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?*+/()'\"-:"
    words = ("".join(source.choices(letters, k=source.randint(1, 9))) for _ in range(source.randint(1, 10)))
    return " ".join(words)
