"""Evaluation of a drafter and its model card, on the toy model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ddtree_reference import drafter as dflash
from ddtree_reference import startup, toy
from ddtree_reference.method import Method
from ddtree_training import card, cli, evaluate, features, teacher, train
from ddtree_training.answers_file import Answer, appending
from ddtree_training.evaluate import Counted, Evaluation

TEMPLATE = Path(__file__).parents[2] / "envs" / "reference" / "training" / "MODEL_CARD.md.j2"
PROMPTS = tuple({"id": f"p{i}", "category": "ab"[i % 2], "prompt": f"Prompt number {i}"} for i in range(4))
EVALUATION = Evaluation("toy", PROMPTS, (Method("DFLASH"), Method("DDTREE", budget=4, topk_cap=4)), 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a drafter was trained for two steps and exported."""
    made = tmp_path_factory.mktemp("drafter")
    with appending(made / "answers.jsonl") as append:
        for i in range(6):
            append(Answer(f"a{i}", "ab"[i % 2], f"prompt {i}", [*range(97, 102)], [*range(97, 110 + i)]))
    arguments = ["--model", "toy", "--output"]
    assert not cli.main(["features", "--answers", str(made / "answers.jsonl"), *arguments, str(made / "features")])
    small = ["--anchors", "4", "--sequences", "2", "--validate-every", "1"]
    for name, folder, steps in (("a", "training", "2"), ("b", "shorter", "1")):
        train = ["train", "--features", str(made / "features"), "--steps", steps, *small, *arguments]
        assert not cli.main([*train, str(made / folder)])
        assert not cli.main(["export", "--training", str(made / folder), "--output", str(made / f"{name}.safetensors")])
    return made


def measured(folder: Path, output: Path) -> dict[str, Any]:
    return evaluate.run(EVALUATION, folder / "a.safetensors", None, output)


def test_tokens_and_rounds_are_those_of_the_engine(folder: Path, tmp_path: Path) -> None:
    result = measured(folder, tmp_path / "evaluation.json")
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result
    assert result["drafter"]["sha256"] == hashlib.sha256((folder / "a.safetensors").read_bytes()).hexdigest()
    chain = result["drafter"]["methods"]["DFLASH:8"]
    assert chain["tokens"] == 4 * 23  # the first token of an answer comes with the prompt
    assert chain["accept_length"] == chain["tokens"] / chain["rounds"] >= 1
    assert sum(part["rounds"] for part in chain["by_category"].values()) == chain["rounds"]


def test_an_ended_evaluation_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, counted = evaluate._count, []

    def ended_at_three(*arguments: Any) -> Counted:
        if len(counted) == 3:
            raise KeyboardInterrupt
        counted.append(1)
        return count(*arguments)

    monkeypatch.setattr(evaluate, "_count", ended_at_three)
    with pytest.raises(KeyboardInterrupt):
        measured(folder, tmp_path / "evaluation.json")
    [notes] = tmp_path.glob("*.jsonl")
    notes.write_bytes(notes.read_bytes()[:-5])  # the last line was not finished
    counted[:] = [1] * 10
    result = measured(folder, tmp_path / "evaluation.json")
    assert len(counted) == 10 + 8 - 2
    assert result == measured(folder, tmp_path / "whole.json")


def test_two_drafters_are_compared_prompt_by_prompt() -> None:
    ours = [Counted("x", "m", f"p{i}", "a", 20 + 2 * i, 10) for i in range(8)]
    theirs = [Counted("y", "m", c.prompt, "a", c.tokens, 20) for c in reversed(ours)]
    result = evaluate.ratio(ours, theirs)
    assert result == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0})


def test_the_card_says_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    result = evaluate.run(EVALUATION, folder / "a.safetensors", folder / "b.safetensors", folder / "evaluation.json")
    assert "comparison" in result
    paths = {"template": TEMPLATE, "answers": folder / "answers.jsonl", "training": folder / "training"}
    paths |= {
        "drafter": folder / "a.safetensors",
        "evaluation": folder / "evaluation.json",
        "output": tmp_path / "C.md",
    }
    assert not cli.main(["card", "--model", "toy", *(part for k, v in paths.items() for part in (f"--{k}", str(v)))])
    text = (tmp_path / "C.md").read_text()
    assert "93 tokens of 6 answers to 6 prompts" in text
    assert "2 steps of 2 sequences x 4 anchors" in text
    chain = result["drafter"]["methods"]["DFLASH:8"]
    assert f"| all 4 | {chain['accept_length']:.2f} |" in text
    assert f"{result['comparison']['DFLASH:8']['ratio']:.3f} (" in text
    (tmp_path / "other").write_bytes(b"")
    with pytest.raises(ValueError, match="measured with another drafter"):
        card.run(
            TEMPLATE,
            "toy",
            paths["answers"],
            paths["training"],
            tmp_path / "other",
            paths["evaluation"],
            tmp_path / "x",
        )


def test_a_drafter_is_not_compared_with_itself(folder: Path, tmp_path: Path) -> None:
    same = folder / "a.safetensors"
    assert "comparison" not in evaluate.run(EVALUATION, same, same, tmp_path / "evaluation.json")


def test_the_curve_is_thinned_from_its_end() -> None:
    assert card.thinned([{"step": i} for i in range(1, 26)], 12) == [{"step": i} for i in range(1, 26, 3)]
    assert card.thinned([], 12) == []


def test_an_unfinished_training_is_not_exported_unasked(tmp_path: Path, folder: Path) -> None:
    settings = train.Settings(steps=3, sequences=2, anchors=2, vocabulary=64)
    source, shards = teacher.load("toy"), features.find(folder / "features")
    step = train._step

    def ended(trainer: train.Trainer, number: int) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return step(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_step", ended)
        with pytest.raises(KeyboardInterrupt):
            train.run(source, shards, tmp_path, settings, train.Intervals(checkpoint=1))
    output = tmp_path / "d.safetensors"
    assert cli.main(["export", "--training", str(tmp_path), "--output", str(output)]) == 2
    assert not output.exists()
    assert not cli.main(["export", "--training", str(tmp_path), "--output", str(output), "--unfinished"])
    dflash.load(output, toy.build_target("mixed", startup.MAX_CONTEXT))
    with safe_open(output, framework="pt") as file:
        assert "layers.1.q.scale" in file.keys()  # noqa: SIM118 - no mapping


def test_prompts_without_a_category_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='p1: no "category"'):
        evaluate.with_categories(tmp_path, [{"id": "p1", "prompt": "x"}])
