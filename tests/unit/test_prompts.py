"""Prompt files: what is refused, which prompts a cell takes, and that the shipped sets are disjoint."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_bench.load import disjoint, prompts
from ddtree_training.prompts import expand

ROOT = Path(__file__).resolve().parents[2]
FILES = {name: ROOT / "config" / "prompts" / f"{name}.jsonl" for name in ("study", "heldout", "warmup")}
TEMPLATES = ROOT / "envs" / "reference" / "training" / "prompts"


@pytest.fixture(scope="module")
def training() -> list[str]:
    """Every prompt that the drafter may have been trained on."""
    return [prompt.text for prompt in expand(TEMPLATES, 0)]


def written(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return path


def record(name: str, text: str, block: Any = 1) -> dict[str, Any]:
    return {"id": name, "block": block, "category": "code", "prompt": text}


def listed(n: int, per_block: int = 4) -> tuple[prompts.Prompt, ...]:
    return tuple(prompts.Prompt(f"p{i}", 1 + i // per_block, "code", f"text {i}") for i in range(n))


def test_a_file_is_read_in_its_order(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", record("b", "Wörter\u2028 and more"), "", record("a", "two", 2))
    found = prompts.read(path)
    assert [(p.id, p.block, p.text) for p in found] == [("b", 1, "Wörter\u2028 and more"), ("a", 2, "two")]
    assert found[1].sha256 == "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "p.jsonl:1: not a line of JSON"),
        (["[1]"], "p.jsonl:1: found list; a prompt has exactly the fields id, block, category, prompt"),
        ([{"id": "a", "promt": "x"}], r"p.jsonl:1: found \['id', 'promt'\]"),
        ([record("a", "x"), record("b", "")], "p.jsonl:2: prompt is ''; give a non-empty str"),
        ([record("a", "x", "1")], "p.jsonl:1: block is '1'"),
        ([record("a", "x", True)], "p.jsonl:1: block is True"),
        ([record("a", "x"), record("a", "y")], r"the id 'a' occurs twice"),
        ([record("a", "x"), record("b", "x")], r"the text 'x' occurs twice \(a, b\); drop one"),
        ([record("a", "x", 2), record("b", "y", 1)], r"block 1 \(b\) follows block 2; sort by block"),
        ([""], "holds no prompt"),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_why(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(prompts.PromptError, match=message):
        prompts.read(written(tmp_path / "p.jsonl", *lines))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(prompts.PromptError, match=r"none.jsonl: No such file.*`prompts`"):
        prompts.read(tmp_path / "none.jsonl")


def test_fault_15_every_cell_starts_at_the_head_of_one_list() -> None:
    all_ = listed(80)
    assert prompts.select(all_, None, 12, 1) == all_[:12]
    assert prompts.select(all_, None, 12, 8) == all_[:32]
    assert prompts.select(all_, None, 12, 20) == all_


def test_fault_15_fewer_prompts_than_four_a_slot_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        prompts.PromptError, match=r"concurrency: 32 .*needs 128 prompts, and there are 80; .*repeat_prompts"
    ):
        prompts.select(listed(80), None, 12, 32)
    with pytest.raises(prompts.PromptError, match=r"n_min: 12 needs 12 prompts, and there are 8"):
        prompts.select(listed(80), (1, 2), 12, 1)


def test_fault_15_repeated_prompts_start_over() -> None:
    all_ = listed(5)
    assert prompts.select(all_, None, 1, 3, repeat_prompts=True) == (*all_, *all_, *all_[:2])


def test_blocks_are_taken_in_full() -> None:
    all_ = listed(80)
    assert prompts.select(all_, (1, 2, 3, 4), 12, 1) == all_[:16]
    assert prompts.select(all_, (1, 2, 3, 4), 12, 4) == all_[:16]


def test_blocks_keep_the_order_of_the_list() -> None:
    all_ = listed(80)
    assert prompts.select(all_, (3, 1), 8, 1) == all_[:4] + all_[8:12]
    with pytest.raises(prompts.PromptError, match=r"blocks: \[0, 21\] not in the prompt file; it has 1 to 20"):
        prompts.select(all_, (0, 1, 21), 4, 1)
    with pytest.raises(prompts.PromptError, match="blocks"):
        prompts.select(all_, (21,), 4, 1, repeat_prompts=True)


def test_the_digest_of_a_set_depends_on_texts_and_order_only() -> None:
    a, b = prompts.Prompt("a", 1, "code", "x"), prompts.Prompt("b", 1, "code", "y")
    renamed = prompts.Prompt("c", 9, "haiku", "x")
    assert prompts.prompt_set_sha256([a, b]) == prompts.prompt_set_sha256([renamed, b])
    assert prompts.prompt_set_sha256([a, b]) != prompts.prompt_set_sha256([b, a])
    assert prompts.prompt_set_sha256([a]) != prompts.prompt_set_sha256([a, b])


# Files of any source


def test_prompts_of_any_source_are_texts_or_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    lines = [{"id": 7, "prompt": "x", "source": "somewhere"}, {"id": "b", "messages": chat}, record("c", "x", 3)]
    found = prompts.read_plain(written(tmp_path / "p.jsonl", *lines))
    assert [(p.id, p.block, p.category, p.text) for p in found] == [
        ("7", 1, "", "x"),
        ("b", 1, "", ""),
        ("c", 3, "code", "x"),
    ]
    assert found[1].messages == tuple(chat)
    canonical = '[{"content":"be short","role":"system"},{"content":"hi","role":"user"}]'
    assert found[1].sha256 == hashlib.sha256(canonical.encode()).hexdigest()
    assert found[0].sha256 == hashlib.sha256(b"x").hexdigest()


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1, "prompt": "a"}\r\n{"id": 2, "prompt": "b"}\r\n')
    assert [p.text for p in prompts.read_plain(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[1]"], "p.jsonl:1: found list; a line is an object with id and either prompt or messages"),
        ([{"id": 1}], r"p.jsonl:1: found \['id'\]; a line is"),
        ([{"id": 1, "prompt": "x", "messages": []}], "either prompt or messages"),
        ([{"prompt": "x"}], "p.jsonl:1: id is None; give a non-empty text or an integer"),
        ([{"id": True, "prompt": "x"}], "id is True"),
        ([{"id": 1.5, "prompt": "x"}], "id is 1.5"),
        ([{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "y"}], "the id '1' occurs twice"),
        ([{"id": 1, "prompt": ["x"]}], r"prompt is \['x'\]; give a non-empty text"),
        ([{"id": 1, "messages": []}], "messages is not a list of objects with a role"),
        ([{"id": 1, "messages": ["hi"]}], "messages is not a list of objects with a role"),
        ([{"id": 1, "messages": [{"content": "hi"}]}], "messages is not a list of objects with a role"),
        (['{"id": 1, "prompt": "\\ud800"}'], "p.jsonl:1: cannot be sent as JSON in UTF-8"),
        (['{"id": 1, "messages": [{"role": "user", "x": NaN}]}'], "cannot be sent as JSON"),
    ],
)
def test_a_line_of_any_source_that_cannot_be_used_says_why(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(prompts.PromptError, match=message):
        prompts.read_plain(written(tmp_path / "p.jsonl", *lines))


@pytest.mark.parametrize("levels", [99, 200, 5000, 200_000])
def test_a_line_that_is_nested_too_deep_says_so(tmp_path: Path, levels: int) -> None:
    deep = "[" * levels + "]" * levels
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"id": 1, "messages": [{{"role": "user", "content": {deep}}}]}}\n')
    with pytest.raises(prompts.PromptError, match=r"p.jsonl:1: lists and objects lie in each other more than 100 deep"):
        prompts.read_plain(path)


def test_messages_with_parts_are_no_deep_nesting(tmp_path: Path) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:"}}]
    path = written(tmp_path / "p.jsonl", {"id": 1, "messages": [{"role": "user", "content": content}]})
    assert len(prompts.read_plain(path)) == 1


@pytest.mark.parametrize("read", [prompts.read, prompts.read_plain])
def test_a_number_of_thousands_of_digits_says_where_it_stands(tmp_path: Path, read: Any) -> None:
    path = written(tmp_path / "p.jsonl", f'{{"id": {"9" * 5000}, "prompt": "x"}}')
    with pytest.raises(prompts.PromptError, match=r"p.jsonl:1: cannot be read \(Exceeds the limit"):
        read(path)


def test_prompts_are_taken_in_order_and_repeat_only_when_asked() -> None:
    all_ = listed(3)
    assert prompts.take(all_, 2) == all_[:2]
    assert prompts.take(all_, 5, repeat=True) == (*all_, *all_[:2])
    with pytest.raises(prompts.PromptError, match="4 requests and 3 prompts"):
        prompts.take(all_, 4)


def test_reading_prompts_imports_nothing_heavy() -> None:
    heavy = "{'pandas', 'numpy', 'requests', 'pyarrow'}"
    code = f"import sys, ddtree_bench.load.prompts; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# Disjointness


def test_equal_texts_overlap_whatever_their_case_and_signs() -> None:
    found = disjoint.overlaps(["What is 2 + 2?"], ["what is 2+2"])
    assert [(one.left, one.right) for one in found] == [("What is 2 + 2?", "what is 2+2")]


def test_eight_shared_words_overlap_and_seven_do_not() -> None:
    text = "one two three four five six seven eight nine"
    assert disjoint.overlaps([text], ["Zero, two three four five six seven EIGHT nine!"])[0].shared.split()[0] == "two"
    assert disjoint.overlaps([text], ["zero three four five six seven eight nine ten"]) == []


def test_a_short_text_inside_a_longer_one_does_not_overlap() -> None:
    assert disjoint.overlaps(["Explain tides"], ["Explain tides to a child"]) == []


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What is 17*23? Show your steps", "What is 17*24? Show your steps"),
        ("What is 15% of 260?", "Calculate 11*41"),
        ("What were the causes of World War I?", "List five facts about World War II"),
        ("Write a haiku about the owls", "Explain an owl in simple terms"),
        ("Write a Python function to reverse a string", "How do I reverse the strings in Python?"),
        ("Explain bubble sort", "Write a short Python function to sort a list with bubble sort"),
        ("Describe tides in 3 sentences", "Tell me about tides in five sentences"),
    ],
)
def test_prompts_of_one_topic_overlap_in_other_words(left: str, right: str) -> None:
    assert disjoint.overlaps([left], [right]) == []
    assert [(one.left, one.right) for one in disjoint.topic_overlaps([left], [right])] == [(left, right)]
    assert [(one.left, one.right) for one in disjoint.topic_overlaps([right], [left])] == [(right, left)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Write a haiku about a market", "Explain the stock market"),
        ("Write a haiku about owls", "Write a haiku about owlets"),
        ("A box holds 12 eggs. How many are in 9 boxes?", "What is 12*9?"),
        ("Explain bubble sort", "Explain merge sort"),
        ("Explain how paper is made", "Explain how steel is made"),
    ],
)
def test_prompts_of_different_topics_do_not_overlap(left: str, right: str) -> None:
    assert disjoint.topic_overlaps([left], [right]) == disjoint.topic_overlaps([right], [left]) == []


@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_one_letter_is_one_insertion_deletion_or_change(left: str, right: str) -> None:
    deleted = {left[:i] + left[i + 1 :] for i in range(len(left))}
    inserted = {left[:i] + c + left[i:] for i in range(len(left) + 1) for c in "abc"}
    changed = {left[:i] + c + left[i + 1 :] for i in range(len(left)) for c in "abc"}
    assert disjoint.one_letter_apart(left, right) == (right in deleted | inserted | changed | {left})


@pytest.mark.parametrize("name", FILES)
def test_shipped_prompts_have_no_topic_of_the_drafters_training_data(name: str, training: list[str]) -> None:
    assert disjoint.topic_overlaps([p.text for p in prompts.read(FILES[name])], training) == []


def test_no_two_heldout_prompts_have_one_topic() -> None:
    texts = [p.text for p in prompts.read(FILES["heldout"])]
    assert [one for i, text in enumerate(texts) for one in disjoint.topic_overlaps([text], texts[:i])] == []


@pytest.mark.parametrize("name", FILES)
def test_shipped_prompts_are_disjoint_from_the_drafters_training_data(name: str, training: list[str]) -> None:
    assert len(training) >= 8000
    assert disjoint.overlaps([p.text for p in prompts.read(FILES[name])], training) == []


@pytest.mark.parametrize(("left", "right"), [("warmup", "heldout"), ("warmup", "study"), ("heldout", "study")])
def test_shipped_files_are_disjoint_from_each_other(left: str, right: str) -> None:
    texts, others = ([p.text for p in prompts.read(FILES[name])] for name in (left, right))
    assert disjoint.overlaps(texts, others) == []
    assert disjoint.topic_overlaps(texts, others) == []


def test_heldout_prompts_come_in_blocks_of_one_prompt_a_category() -> None:
    found = prompts.read(FILES["heldout"])
    blocks = [[p.category for p in found if p.block == block] for block in range(1, 21)]
    assert blocks == [["code", "explain", "arithmetic", "haiku"]] * 20
    assert len(found) == 80


def test_the_study_has_its_two_sets_of_tasks() -> None:
    by_block = {b: [p.id for p in prompts.read(FILES["study"]) if p.block == b] for b in (1, 2)}
    assert by_block[1] == ["quicksort", "relativity", "arithmetic", "haiku", "json-parser"]
    assert by_block[2] == ["fibonacci", "quicksort-3-sentences", "two-plus-two"]
    assert [p.text for p in prompts.read(FILES["study"]) if p.category == "arithmetic"] == [
        "What is 17*24? Show your steps",
        "What is 2+2? Answer with just the number",
    ]
