"""How many tokens an answer has when the server says so, says so too early, or leaves it to a tokenizer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tokenizers
from hypothesis import strategies as st
from laws import law
from raw_rows import failed, frame, row, steady_stream
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ddtree_bench import metrics
from ddtree_bench.load.tokenizer import Tokenizer, TokenizerError
from ddtree_bench.metrics.answers import answer
from ddtree_bench.plan import Load

approx = pytest.approx

CORPUS = ["the tree drafts and the target verifies.\n", "naïve 🌳 words, words\n\n", "def f(x):\n    return x\n"] * 4


def byte_level() -> tokenizers.Tokenizer:
    """A small byte-level BPE as most models have, with a post-processor that trims and adds special tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


@pytest.fixture(scope="module")
def raw_tokenizer() -> tokenizers.Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def one(raw: dict[str, Any]) -> pd.Series[Any]:
    return metrics.request_metrics(frame(raw)).iloc[0]


def cell(*rows: dict[str, Any]) -> dict[str, Any]:
    return metrics.cell_metrics(frame(*rows), Load(1), "AR")


# The tokenizer


@law(cuts=st.lists(st.integers(0, 200), max_size=30), corpus=st.permutations(CORPUS[:3]))
def test_parts_of_a_text_share_the_tokens_of_the_whole(
    tokenizer: Tokenizer, raw_tokenizer: tokenizers.Tokenizer, cuts: list[int], corpus: list[str]
) -> None:
    text = "".join(corpus)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = raw_tokenizer.encode(text, add_special_tokens=False).ids
    counts = tokenizer.counts(parts)
    assert sum(counts) == len(whole)
    assert len(counts) == len(parts)


def test_a_token_belongs_to_the_part_of_its_last_character(raw_tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level())
    text = "the tree drafts.\n"
    pieces = [raw_tokenizer.decode([i]) for i in raw_tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert tokenizer.counts(pieces) == [1] * len(pieces)
    longest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
    assert len(pieces[longest]) > 1
    cut = [*pieces[:longest], pieces[longest][:1], pieces[longest][1:], *pieces[longest + 1 :]]
    assert tokenizer.counts(cut) == [1] * longest + [0] + [1] * (len(pieces) - longest)


def test_a_character_of_several_tokens_has_them_all(tokenizer: Tokenizer) -> None:
    counts = tokenizer.counts(["a", "🪿", "b"])
    assert (counts[0], counts[2]) == (1, 1)
    assert counts[1] == len(byte_level().encode("🪿").ids) > 1


def test_a_token_that_ends_in_blanks_belongs_to_the_part_of_the_blanks() -> None:
    """Code has tokens such as a line break and its indent; offsets that trim it put it where the line break came."""
    made = tokenizers.Tokenizer(models.WordLevel({"end": 0, "ĊĠĠ": 1}, unk_token="end"))
    split = pre_tokenizers.Split(tokenizers.Regex(r"\n +"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    assert made.encode("end\n  ").offsets == [(0, 3), (3, 4)]
    assert Tokenizer(made).counts(["end", "\n", "  "]) == [1, 0, 1]


def test_no_text_has_no_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.counts([]) == []
    assert tokenizer.counts(["", ""]) == [0, 0]
    assert tokenizer.counts(["", "the", ""])[::2] == [0, 0]


def test_a_folder_and_its_file_are_the_same_and_limits_in_the_file_are_not_kept(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "tokenizer.json"))
    whole = len(byte_level().encode(CORPUS[0]).ids)
    assert whole > 3
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert Tokenizer.from_path(path).counts([CORPUS[0]]) == [whole]


def test_a_path_without_a_tokenizer_says_what_to_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "other.json"):
        with pytest.raises(TokenizerError, match=r"does not exist there; name a folder with a tokenizer\.json"):
            Tokenizer.from_path(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        Tokenizer.from_path(tmp_path)


# Which count is N


def test_without_usage_the_tokenizer_counts() -> None:
    raw = row([(0.1, "one", None), (0.2, "two", None)], tokens=None, event_tokenized=[2, 3, 0, 0])
    metric, of_cell = one(raw), cell(raw)
    names = ["output_tokens", "token_source", "n1", "n1_source"]
    assert metric[names].tolist() == [5, "tokenizer", 2, "tokenizer"]
    assert metric["tpot_s"] == approx(0.1 / 3)
    assert (of_cell["token_source"], of_cell["output_tokens_all_requests"]) == ("tokenizer", 5)


def test_usage_goes_before_the_tokenizer() -> None:
    raw = row([(0.1, "one", 1), (0.2, "two", 4)], tokens=4, event_tokenized=[2, 3, 0, 0])
    assert one(raw)[["output_tokens", "token_source", "n1", "n1_source"]].tolist() == [4, "usage", 1, "usage"]


@pytest.mark.parametrize(
    ("tokenized", "tokens", "counts"),
    [
        ([2, 3], 5, [2, 3]),
        ([2, 3], 6, [2, 4]),  # an EOS, which has no text
        ([2, 3], 10, [4, 6]),  # markers that the server took out
        ([4, 6], 5, [2, 3]),
        ([0, 4], 4, [1, 3]),  # the first event has text, so it has a token
        ([0, 1], 1, [1, 0]),
    ],
)
def test_the_tokenizer_shares_the_servers_count_over_events(
    tokenized: list[int], tokens: int, counts: list[int]
) -> None:
    raw = row([(0.1, "a", None), (0.2, "b", None)], tokens=tokens, event_tokenized=[*tokenized, 0, 0])
    found = answer(frame(raw).iloc[0])
    assert found is not None
    assert found.tokens.counts is not None
    assert (found.tokens.counts.tolist(), found.tokens.total, found.tokens.source) == (counts, tokens, "usage")
    assert (found.tokens.n1, found.tokens.n_source) == (counts[0], "tokenizer")


def test_an_eos_of_a_single_event_is_not_in_n1() -> None:
    raw = row([(0.4, "a", None)], tokens=2, finish=0.5, event_tokenized=[1, 0, 0, 0])
    assert one(raw)[["n1", "tpot_s"]].tolist() == [1, approx(0.1)]


def test_usage_that_was_given_before_the_answer_ended_is_no_count_of_it() -> None:
    """A count with the first event, then none: N is what the tokenizer says, and unknown without one."""
    raw = row([(0.1, "one", 1), (0.2, "two", None)], tokens=1)
    raw["event_tokens"] = [1, None, None, None]
    assert pd.isna(one(raw)["output_tokens"])
    assert cell(raw)["throughput_full_tok_s"] is None
    counted = one(raw | {"event_tokenized": [1, 2, 0, 0]})
    assert counted[["output_tokens", "token_source"]].tolist() == [3, "tokenizer"]


def test_a_count_of_nothing_beside_text_is_no_count() -> None:
    raw = row([(0.1, "one", None), (0.2, "two", None)], tokens=0)
    assert pd.isna(one(raw)["output_tokens"])
    assert one(raw | {"event_tokenized": [1, 1, 0, 0]})["output_tokens"] == 2


def test_sources_that_differ_are_mixed() -> None:
    counted = row([(0.1, "a", None), (0.2, "b", None)], tokens=None, index=1, event_tokenized=[1, 1, 0, 0])
    found = cell(steady_stream(4, 0.1), counted)
    assert (found["token_source"], found["output_tokens"], found["n_source"]) == ("mixed", 6, "mixed")


def test_tokens_of_all_requests_are_those_that_came() -> None:
    cut = row([(0.1, "a", 1), (0.2, "b", 4)], tokens=4, index=1, status="truncated")
    silent = failed("timeout", index=2)
    assert cell(steady_stream(4, 0.1), cut, silent)["output_tokens_all_requests"] == 8
    uncounted = row([(0.1, "a", None)], tokens=None, index=3, status="truncated")
    assert cell(steady_stream(4, 0.1), uncounted)["output_tokens_all_requests"] is None
    assert cell(steady_stream(4, 0.1), uncounted | {"event_tokenized": [1, 0, 0]})["output_tokens_all_requests"] == 5
