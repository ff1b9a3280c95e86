"""Answers for training: the same file whatever was killed and however many were decoded at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_server import chat_ids

from ddtree_reference import decode, startup
from ddtree_reference.method import Method
from ddtree_reference.sequence import Request
from ddtree_training import answers, answers_file
from ddtree_training.prompts import Prompt

PROMPTS = [Prompt(f"p{n}", "code", f"{word} {n}") for n, word in enumerate(["a", "Write a poem", "2+2", "zebra"] * 6)]
MAX_TOKENS = 30


def generated(path: Path, sequences: int, tokens: int = 250) -> str:
    opened = startup.open_engine("toy", "auto", [Method()], sequences)
    held = answers.generate(opened.engine, opened.tokenizer, PROMPTS, tokens, MAX_TOKENS, path)
    assert held == sum(len(answer.answer_tokens) for answer in answers_file.read(path)) >= tokens
    return path.read_text()


def test_the_file_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    alone = generated(tmp_path / "alone.jsonl", 1)
    assert generated(tmp_path / "five.jsonl", 5) == alone
    assert generated(tmp_path / "five.jsonl", 3) == alone, "nothing is left to do"
    found = answers_file.read(tmp_path / "alone.jsonl")
    assert [answer.id for answer in found] == [prompt.id for prompt in PROMPTS[: len(found)]]
    assert sum(len(answer.answer_tokens) for answer in found[:-1]) < 250


@pytest.mark.parametrize("killed_after", [1, 4, 7])
def test_a_run_that_was_killed_makes_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    whole = generated(tmp_path / "whole.jsonl", 5)
    genuine, written = answers_file._line, []

    def killed(answer: answers_file.Answer) -> str:
        if len(written) == killed_after:
            raise KeyboardInterrupt
        written.append(answer.id)
        return genuine(answer)

    with monkeypatch.context() as patch:
        patch.setattr(answers_file, "_line", killed)
        with pytest.raises(KeyboardInterrupt):
            generated(tmp_path / "parts.jsonl", 5)
    assert len(answers_file.read(tmp_path / "parts.jsonl")) == killed_after
    assert generated(tmp_path / "parts.jsonl", 4) == whole


def test_answers_are_those_of_the_target_alone(tmp_path: Path) -> None:
    generated(tmp_path / "a.jsonl", 4)
    opened = startup.open_engine("toy", "auto", [Method()])
    for answer in answers_file.read(tmp_path / "a.jsonl"):
        request = Request(tuple(chat_ids(opened, answer.prompt)), MAX_TOKENS, opened.tokenizer.eos)
        rounds = decode.generate(opened.engine, Method(), request)
        assert [token for step in rounds for token in step.tokens] == list(answer.answer_tokens)
