"""Trained models on disk: a folder `target` and a folder `drafter`, made once, in one step or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from sglang_micro_models import drafter, tokenizer, training
from sglang_micro_models.identity import Identity, digest, folder_name

DONE = "micro_model.json"  # what made the folder


def ensure(cache: Path, identity: Identity, recipe: training.Recipe | None = None) -> Path:
    """The folder of a model below `cache`, trained if it is not there yet; a second call does nothing.

    `recipe` is for tests that shorten the training: such folders carry it in their name.
    """
    name = folder_name(identity) if recipe is None else f"{folder_name(identity)}-{_short(recipe)}"
    folder = cache / name
    if not (folder / DONE).is_file():
        write(folder, identity, recipe or training.Recipe())
    return folder


def write(folder: Path, identity: Identity, recipe: training.Recipe) -> None:
    """Train a model and put it at `folder`, which appears complete; FileExistsError if something is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(partial, training.train(identity, recipe))
        made_by = {**identity._asdict(), "digest": digest(*identity)}
        (partial / DONE).write_text(json.dumps(made_by, indent=2) + "\n")
        partial.chmod(0o755)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save(folder: Path, pair: training.Pair) -> None:
    """Write a pair in Hugging Face form: `folder`/target and `folder`/drafter."""
    pair.target.model.save_pretrained(folder / "target")
    tokenizer.save(folder / "target")
    drafter.save(pair.drafter, folder / "drafter")


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if (folder / DONE).is_file():  # somebody else was faster
            return
        raise FileExistsError(
            f"--out {folder}: the folder exists and holds no finished micro model; remove it, or name another one"
        ) from None


def _short(recipe: training.Recipe) -> str:
    return f"{recipe.target_steps}x{recipe.drafter_steps}"
