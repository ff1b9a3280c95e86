"""What is wrapped around the worker and the walk of a DDTREE server."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree_probe.mutants import MUTANTS
from sglang_ddtree import sampling, worker


def install(folder: Path) -> None:
    """Wrap them, as of the package's docstring."""
    _mutate_walks(folder / "mutant")
    _leak_once(folder / "leak")
    _save_rounds(folder / "rounds")


def _mutate_walks(control: Path) -> None:
    original = sampling.walk

    def walk(verify_input: Any, chosen: Tensor) -> Any:
        if control.exists():
            chosen = MUTANTS[control.read_text()](verify_input, chosen)
        return original(verify_input, chosen)

    sampling.walk = walk


def _leak_once(control: Path) -> None:
    original = worker.DDTreeWorker._round

    def round_(self: Any, *args: Any) -> Any:
        if control.exists():
            control.unlink()
            allocator = self.model_runner.token_to_kv_pool_allocator
            assert allocator.alloc(allocator.page_size) is not None
        return original(self, *args)

    worker.DDTreeWorker._round = round_


def _save_rounds(folder: Path) -> None:
    """Save what was drafted (candidates and tree), what the target said (logits and its tokens), and the walk."""
    numbers = itertools.count()
    saved: dict[str, Tensor] = {}
    draft, verify_input = worker.DDTreeWorker._draft, worker.DDTreeWorker._verify_input
    sample, walk = sampling.sample, sampling.walk

    def kept_draft(self: Any, *args: Any) -> Any:
        found = draft(self, *args)
        saved.update(log_probs=found.log_probs.clone())
        return found

    def kept_verify_input(self: Any, batch: Any, roots: Tensor, ids: Tensor, tree: Any) -> Any:
        saved.update(roots=roots.clone(), ids=ids.clone(), parents=tree.parents.clone())
        saved.update(depths=tree.depths.clone(), ranks=tree.ranks.clone(), requests=batch.req_pool_indices.clone())
        return verify_input(self, batch, roots, ids, tree)

    def kept_sample(original: Any, verify_input: Any, batch: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        saved["target_logits"] = output.next_token_logits.clone()
        return sample(original, verify_input, batch, output, *args, **kwargs)

    def kept_walk(verify_input: Any, chosen: Tensor) -> Any:
        predict, committed, accepted = result = walk(verify_input, chosen)
        if folder.is_dir():
            shape = chosen.shape
            walked = {"chosen": chosen, "predict": predict.view(shape), "committed": committed, "accepted": accepted}
            path = folder / f"{next(numbers):06d}.pt"
            torch.save({**saved, **walked}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        return result

    worker.DDTreeWorker._draft, worker.DDTreeWorker._verify_input = kept_draft, kept_verify_input
    sampling.sample, sampling.walk = kept_sample, kept_walk
