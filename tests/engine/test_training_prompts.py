from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import ddtree_reference
from ddtree_bench.load import disjoint
from ddtree_training.prompts import Prompt, exclude, expand

ROOT = Path(__file__).parents[2]
PROMPTS = Path(ddtree_reference.__file__).parent.parent / "training" / "prompts"
SHARES = {"explain": 0.40, "code": 0.35, "arithmetic": 0.15, "haiku": 0.10}

GROUP = """
[[group]]
per_topic = 2
templates = '''
What is {topic}?
Explain {topic}
'''
topics = '''
rain
snow
'''
"""


def measured() -> list[str]:
    files = (ROOT / "config" / "prompts" / f"{name}.jsonl" for name in ("heldout", "study", "warmup"))
    return [json.loads(line)["prompt"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]


@cache
def training() -> tuple[Prompt, ...]:
    return tuple(exclude(expand(PROMPTS, 0), measured()))


def test_enough_prompts_are_left_and_all_are_distinct() -> None:
    assert len(training()) >= 8000
    assert len({disjoint.normalise(prompt.text) for prompt in training()}) == len(training())
    assert len({prompt.id for prompt in training()}) == len(training())
    assert not [prompt.text for prompt in training() if "{" in prompt.text]


def test_they_share_nothing_with_measured_prompts_by_the_rule_of_the_benchmark() -> None:
    texts = [prompt.text for prompt in training()]
    assert disjoint.overlaps(texts, measured()) == []
    assert disjoint.topic_overlaps(texts, measured()) == []


@pytest.mark.parametrize("length", [100, 1000, 8000])
def test_a_prefix_holds_all_categories_in_proportion(length: int) -> None:
    counts = Counter(prompt.category for prompt in training()[:length])
    assert {category: counts[category] / length for category in SHARES} == pytest.approx(SHARES, abs=0.03)


def test_the_seed_settles_the_list() -> None:
    assert expand(PROMPTS, 1) == expand(PROMPTS, 1)
    assert expand(PROMPTS, 1) != expand(PROMPTS, 2)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("Explain how a Refrigerator works", "explain how a refrigerator works?"),
        ("What is 17*23?", "What is 17*24? Show your steps"),
        ("How do toasters work when the bread is out?", "Why is a toaster out of bread?"),
        ("Write a haiku about a log", "Write a haiku about fog"),
        ("Why? As the day was long and the night was cold", "Well, as the day was long and the night was dark"),
    ],
)
def test_what_overlaps_is_excluded(text: str, other: str) -> None:
    prompt = Prompt("x-1", "x", text)
    assert exclude([prompt], [other]) == []
    assert exclude([prompt], ["What is jazz?"]) == [prompt]


def test_each_topic_comes_once_before_one_comes_again(tmp_path: Path) -> None:
    (tmp_path / "explain.toml").write_text(GROUP, encoding="utf-8")
    prompts = expand(tmp_path, 0)
    assert [prompt.id for prompt in prompts] == [f"explain-{n:05d}" for n in (1, 2, 3, 4)]
    for half in (prompts[:2], prompts[2:]):
        assert {prompt.text.rstrip("?").split()[-1] for prompt in half} == {"rain", "snow"}


def test_slots_of_a_problem_are_filled_alike(tmp_path: Path) -> None:
    (tmp_path / "arithmetic.toml").write_text(
        "[[group]]\ncopies = 5\nproblems = '{who} has {a*b} nuts, {a} a day for {b} days, so {a+b} or {a-b}'\n"
        "numbers = {a = [5, 9], b = [2, 4]}\nwords = {who = 'Ada'}\n",
        encoding="utf-8",
    )
    for prompt in expand(tmp_path, 0):
        numbers = [int(word.strip(",")) for word in prompt.text.split() if word.strip(",").isdigit()]
        product, a, b, total, difference = numbers
        assert (product, total, difference) == (a * b, a + b, a - b)
        assert prompt.text.startswith("Ada has ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no prompt files"),
        ("group = ", "not TOML"),
        ("x = 1", r"no \[\[group\]\]"),
        (GROUP.replace("per_topic = 2", "per_topic = 3"), "per_topic = 3; choose 1 to 2"),
        (GROUP.replace("templates", "template"), "no 'templates'"),
        ("[[group]]\ncopies = 1\nproblems = 'What is {a}?'\nnumbers = {}", "no 'a'"),
    ],
)
def test_files_that_make_no_prompts_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "explain.toml").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        expand(tmp_path, 0)
