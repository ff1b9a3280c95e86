"""A line of JSON for each batched round: what was drafted, what was accepted, and how long each stage took."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ddtree_reference import tree
from ddtree_reference.decode import Round, StageTimes

log = logging.getLogger("ddtree_reference")


def describe(rounds: Sequence[Round], seconds: StageTimes) -> dict[str, Any]:
    """The numbers of one batched round, sums over its sequences.

    `accept_histogram[k]` counts sequences with k accepted drafts, `rows` are those of the target forward, `nodes` the
    drafted tokens (without roots), `branching_nodes` those with two children or more, `depth` is the deepest tree's.
    """
    accepted = Counter(step.accepted for step in rounds)
    trees = [step.tree for step in rounds if step.tree is not None]
    chains = [step.width - 1 for step in rounds if step.tree is None]
    return {
        "sequences": len(rounds),
        "rows": sum(step.width for step in rounds),
        "committed": sum(len(step.tokens) for step in rounds),
        "accept_histogram": [accepted[k] for k in range(max(accepted, default=-1) + 1)],
        "nodes": sum(step.width - 1 for step in rounds),
        "branching_nodes": sum(tree.branching_nodes(shape.parents) for shape in trees),
        "depth": max([*chains, *(max(shape.depths) for shape in trees)], default=0),
        "seconds": {stage: round(value, 7) for stage, value in asdict(seconds).items()},
    }


class RoundLog:
    """Appends rounds to a file; each line also says when (seconds of the Unix clock) and how many requests waited."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = path.open("a", encoding="utf-8", buffering=1)

    def write(self, rounds: Sequence[Round], seconds: StageTimes, waiting: int) -> None:
        """Append one batched round. A log that cannot be written ends there, and serving goes on."""
        if self._file is None:
            return
        line = {"time": time.time(), "waiting": waiting, **describe(rounds, seconds)}
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            log.warning("--round-log: %s; no more rounds are logged", error)
            self._file = None
