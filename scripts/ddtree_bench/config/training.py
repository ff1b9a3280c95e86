"""The section `training`: how the embedded engine's drafter is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class Training(BaseModel):
    """The training of the embedded engine's drafter, `snakemake train_drafter`. No cell depends on it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    model: Literal["smollm2", "toy"] = "smollm2"
    """The target that a drafter is trained for; `toy` is for tests."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the prompts and of the training."""
    threads: Count = 2
    """Threads of one tensor operation; no result's name depends on it."""
    answer_tokens: Count = 600_000
    """Tokens of the target's own answers to train on, in all. Recording 600,000 takes 4.5 GB of disk."""
    max_answer_tokens: Annotated[int, Field(ge=2, le=900)] = 180
    """Most tokens of one answer; a prompt and its answer have room for 1,024."""
    batch: Count = 48
    """Answers decoded at a time; no result's name depends on it."""
    steps: Count = 6000
    """Length of the training."""
    evaluate_prompts: str = "config/prompts/heldout.jsonl"
    """Prompts on which the new drafter is compared with the committed one (JSON lines with id, category, prompt),
    relative to the repository. Training prompts keep away from these and from all in `config/prompts/`."""
    evaluate_limit: Count | None = None
    """Compare on the first prompts only; by default on all."""
    evaluate_tokens: Count = 64
    """Most tokens of an answer in that comparison."""
