"""The drafter's training: command lines that its package takes, folders by what decides their content, no plan key."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project

from ddtree_bench.config import ConfigError
from ddtree_bench.config.training import Training
from ddtree_bench.drafter_training import DrafterTraining
from ddtree_bench.project import Project, open_project
from ddtree_training.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]


def project(training: dict[str, Any]) -> Project:
    config = tree() | {"training": training, "warmup": {}}
    config["workloads"]["short"]["prompts"] = "config/prompts/heldout.jsonl"
    return open_project(config, ROOT)


def training(**settings: Any) -> DrafterTraining:
    return DrafterTraining.of(project(settings))


@pytest.mark.parametrize("model", ["smollm2", "toy"])
def test_the_package_takes_every_command_line(model: str) -> None:
    for stage in training(model=model, evaluate_limit=3, steps=7).stages:
        options = build_parser().parse_args(stage.arguments(threads=2))
        assert options.command == stage.name
        assert getattr(options, "threads", 1) == (2 if stage.parallel else 1)
        if stage.name == "evaluate":
            committed = ROOT / "envs" / "reference" / "ddtree_reference" / "data" / "drafter.safetensors"
            assert options.compare == (committed if model == "smollm2" else None)
            assert options.limit == 3 and options.tokens == 64


def test_stages_follow_each_other() -> None:
    stages = training().stages
    for stage, following in pairwise(stages):
        assert stage.output in following.inputs
    assert {path for path in stages[0].inputs if path.suffix == ".jsonl"} == set(
        (ROOT / "config" / "prompts").glob("*.jsonl")
    )


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"threads": 1, "batch": 4}, ["prompts", "answers", "features", "train", "export", "evaluate", "card"]),
        ({"evaluate_tokens": 8}, ["prompts", "answers", "features", "train", "export"]),
        ({"steps": 10}, ["prompts", "answers", "features"]),
        ({"answer_tokens": 10}, []),
        ({"max_answer_tokens": 10}, []),
        ({"seed": 1}, []),
    ],
)
def test_a_setting_keeps_what_it_does_not_decide(changed: dict[str, Any], kept: list[str]) -> None:
    before, after = training(), training(**changed)
    assert [stage.name for stage in before.stages if stage.output == after.stage(stage.name).output] == kept


def test_other_prompts_make_another_training(tmp_path: Path) -> None:
    write_project(tmp_path)
    templates = tmp_path / "envs" / "reference" / "training" / "prompts"
    templates.mkdir(parents=True)

    for name in ("requirements.lock", "torch.in"):
        (templates.parents[1] / name).touch()

    def folder() -> Path:
        return DrafterTraining.of(open_project(tree(), tmp_path)).folder

    names = [folder()]
    (templates / "code.toml").write_text("[[group]]")
    names.append(folder())
    (tmp_path / "config" / "prompts").mkdir(parents=True)
    (tmp_path / "config" / "prompts" / "heldout.jsonl").write_text("{}")
    names.append(folder())
    assert len(set(names)) == 3


def test_it_is_no_part_of_any_plan_key() -> None:
    others = {"model": "toy", "seed": 5, "steps": 3, "answer_tokens": 9, "evaluate_limit": 2, "threads": 1}
    assert {cell.key for cell in project({}).plan.cells} == {cell.key for cell in project(others).plan.cells}


def test_it_says_how_a_drafter_is_taken() -> None:
    said = training().installation
    assert "drafter.safetensors envs/reference/ddtree_reference/data/drafter.safetensors" in said
    assert "MODEL_CARD.md envs/reference/MODEL_CARD.md" in said
    assert "cp " not in training(model="toy").installation


def test_settings_have_defaults_and_bounds() -> None:
    assert Training() == project({}).config.training
    with pytest.raises(ConfigError, match=r"training\.steps: 0 is not allowed"):
        project({"steps": 0})
    with pytest.raises(ConfigError, match=r"training\.stepps: unknown key; did you mean 'steps'"):
        project({"stepps": 1})
