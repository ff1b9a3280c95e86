"""Which prompts of its workload a cell takes: by the requests in flight, or by how long requests arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddtree_bench.load.prompts import Prompt, PromptError, of_blocks, select, take

if TYPE_CHECKING:
    from ddtree_bench.config.models import Workload


def cell_prompts(
    spec: Workload, prompts: Sequence[Prompt], concurrency: int, rate: float | None = None
) -> tuple[Prompt, ...]:
    """Return the prompts of one cell, in the order of the file.

    In closed loop as `select` says. With a rate (requests/s) the first max(n_min, rate x open_loop_s), or with `blocks`
    all of these, at least as many. Raises PromptError when a block does not exist or there are too few prompts.
    """
    if rate is None:
        return select(prompts, spec.blocks, spec.n_min, concurrency, spec.repeat_prompts)
    chosen = of_blocks(prompts, spec.blocks)
    n = max(spec.n_min, math.ceil(rate * spec.open_loop_s))
    if n > len(chosen) and not spec.repeat_prompts:
        raise PromptError(
            f"rate: {rate:g} for open_loop_s: {spec.open_loop_s:g} needs {n} prompts, and there are {len(chosen)}; "
            "lower them, add prompts or blocks, or set repeat_prompts: true"
        )
    return take(chosen, n if spec.blocks is None else max(n, len(chosen)), repeat=True)
