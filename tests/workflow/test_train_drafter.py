"""`snakemake train_drafter` on the toy model: from prompts to the model card, whatever is killed on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clone import Clone, eventually

STAGES = ("prompts", "answers", "features", "train", "export", "evaluate", "card")
STEPS = 200  # with a checkpoint each 100
LEFT_AFTER_S = 30.0


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    """A clone that trains a drafter of the toy; it needs no deployed engine."""
    made = Clone.make(tmp_path / "clone")
    made.config["training"] = {
        "model": "toy",
        "threads": 1,
        "answer_tokens": 500,
        "max_answer_tokens": 24,
        "steps": STEPS,
        "evaluate_limit": 1,
        "evaluate_tokens": 12,
    }
    yield made
    for process in made.processes():
        process.kill()


def files(clone: Clone, pattern: str = "**/*") -> dict[Path, int]:
    """The files of the training that a pattern means, and when each was written last, in ns."""
    paths = (clone.root / "results" / "drafter").glob(f"toy-*/{pattern}")
    return {path: path.stat().st_mtime_ns for path in paths if path.is_file()}


def curve(clone: Clone) -> list[dict[str, Any]]:
    """What the training noted so far."""
    return [
        json.loads(line)
        for path in files(clone, "steps-*/training/curve.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def log(clone: Clone, stage: str) -> str:
    return (clone.root / "results" / "logs" / "drafter" / f"{stage}.log").read_text()


def nothing_is_left(clone: Clone) -> None:
    eventually(lambda: not clone.processes(), LEFT_AFTER_S, f"no process left, but there are {clone.processes()}")


def test_a_training_that_is_killed_goes_on_and_once_finished_stays(clone: Clone) -> None:
    process = clone.start("train_drafter")
    eventually(lambda: files(clone, "steps-*/training/checkpoint.pt"), 90, "a checkpoint")
    process.kill()
    process.communicate()
    nothing_is_left(clone)
    assert "interrupted by SIGTERM" in log(clone, "train")
    data = files(clone, "*.jsonl") | files(clone, "answers/*") | files(clone, "features/*")
    kept = [entry for entry in curve(clone) if entry["step"] <= STEPS // 2]

    process = clone.start("train_drafter")
    eventually(lambda: len(curve(clone)) > len(kept), 60, "a training that goes on")
    next(
        process for process in clone.processes() if "run_drafter_stage.py" in " ".join(process.info["cmdline"] or [])
    ).kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    nothing_is_left(clone)

    output = clone.snakemake("train_drafter")
    assert f"training: {STEPS // 2} of {STEPS // 2} steps" in output
    assert f"training: {STEPS // 2} of {STEPS // 2} steps" in log(clone, "train")
    assert curve(clone)[: len(kept)] == kept and curve(clone)[-1]["step"] == STEPS
    assert data == {path: files(clone)[path] for path in data}
    [card] = files(clone, "steps-*/evaluation-*/MODEL_CARD.md")
    assert f"{STEPS} steps of" in card.read_text() and str(card.relative_to(clone.root)) in output
    assert all((clone.root / "results" / "logs" / "drafter" / f"{stage}.log").exists() for stage in STAGES)

    before = files(clone)
    again = clone.snakemake("train_drafter")
    assert "drafter_" not in again and str(card.relative_to(clone.root)) in again
    assert files(clone) == before
    everything = clone.snakemake("-n", "all")
    assert "run-local-toy-ar-r1" in everything and "drafter_" not in everything
