"""From a training's checkpoint to the drafter's file."""

from __future__ import annotations

from pathlib import Path

from ddtree_reference import drafter
from ddtree_training import checkpoint


def run(folder: Path, output: Path, unfinished: bool = False) -> int:
    """Write the averaged weights of the checkpoint in `folder` as int8 to `output`; returns the steps done.

    Raises ValueError if there is no checkpoint, or if it is of a training that has not ended and `unfinished` is not
    set.
    """
    state = checkpoint.load(folder)
    if state is None:
        raise ValueError(f"{folder}: no checkpoint; train into it first")
    step, steps = state["step"], state["settings"]["steps"]
    if step < steps and not unfinished:
        raise ValueError(f"{folder}: step {step} of {steps}; go on with the training, or export with --unfinished")
    config = drafter.Config(**{**state["config"], "feature_layers": tuple(state["config"]["feature_layers"])})
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(output.name + ".tmp")
    drafter.save(part, config, state["ema"], state["vocabulary"])
    part.replace(output)
    return int(step)
