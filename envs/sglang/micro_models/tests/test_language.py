"""The toy language: words that branch, odds that the grammar states, text that ends."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product

from sglang_micro_models import language


def test_words_are_distinct_and_share_first_syllables_in_pairs() -> None:
    words = [word for words in language.make_grammar(0).words for word in words]
    assert len(set(words)) == language.CLASSES * language.WORDS_PER_CLASS
    assert set(Counter(word[:2] for word in words).values()) == {2}
    assert all(word[i : i + 2] in language.SYLLABLES for word in words for i in range(0, len(word), 2))


def test_after_a_word_each_word_is_the_likeliest_for_one_word_before_it() -> None:
    for order in language.make_grammar(0).order:
        for last in range(language.WORDS_PER_CLASS):
            likeliest = sorted(order[before][last][0] for before in range(language.WORDS_PER_CLASS))
            assert likeliest == list(range(language.WORDS_PER_CLASS))


def test_every_order_is_a_permutation() -> None:
    indices = range(language.WORDS_PER_CLASS)
    for order, before, last in product(language.make_grammar(0).order, indices, indices):
        assert sorted(order[before][last]) == list(indices)


def test_the_entropy_of_the_next_word_leaves_several_likely_continuations() -> None:
    assert math.isclose(sum(language.RANK_WEIGHTS), 1.0)
    entropy = -sum(weight * math.log(weight) for weight in language.RANK_WEIGHTS)
    assert 0.5 < entropy < 1.2


def test_words_follow_in_the_stated_odds() -> None:
    grammar, source = language.make_grammar(0), random.Random(1)
    place = {word: (c, i) for c, words in enumerate(grammar.words) for i, word in enumerate(words)}
    ranks: Counter[int] = Counter()
    for _ in range(2000):
        words = [place[word] for word in language.answer(grammar, source).replace(".", "").split()]
        for (_, before), (_, last), (c, i) in zip(words, words[1:], words[2:], strict=False):
            ranks[grammar.order[c][before][last].index(i)] += 1
    n = ranks.total()
    for rank, weight in enumerate(language.RANK_WEIGHTS):
        assert abs(ranks[rank] / n - weight) < 4 * math.sqrt(weight * (1 - weight) / n)


def test_answers_end_and_seeds_give_other_languages() -> None:
    grammar, source = language.make_grammar(0), random.Random(0)
    lengths = [language.answer(grammar, source).count(".") for _ in range(500)]
    assert min(lengths) == 1
    assert 5 < sum(lengths) / len(lengths) < 15
    assert language.make_grammar(0) == grammar != language.make_grammar(1)
