"""The micro models that tests serve: trained once, where the workflow keeps them too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "envs" / "sglang" / "micro_models"
CACHE = ROOT / "results" / "micro_models"


class ModelPair(NamedTuple):
    """Folders of a target and of its DFlash drafter, in Hugging Face form."""

    target: Path
    drafter: Path


def micro_model(kind: str, python: Path) -> ModelPair:
    """Train a micro model of a kind, or take it from the folder that DDTREE_BENCH_MICRO_MODELS names, or the cache."""
    trained = os.environ.get("DDTREE_BENCH_MICRO_MODELS")
    if trained:
        folder = Path(trained) / kind
    else:
        command = [python, "-m", "sglang_micro_models", "--kind", kind, "--out", CACHE]
        variables = {**os.environ, "PYTHONPATH": str(TRAINING)}
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables).stdout
        folder = Path(printed.splitlines()[-1])
    return ModelPair(folder / "target", folder / "drafter")
