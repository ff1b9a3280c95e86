"""What is reported of a round: plain numbers, and their sums over the requests of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STAGES = ("draft", "head_topk", "tree", "verify", "commit")
"""The parts of a round, in order; they leave no gap.

`draft` is the draft model's forward and what prepares it, `head_topk` the candidates from the target's head, `tree` the
tree with its mask and positions, `verify` the target's forward, the walk and the move of the accepted path's KV, and
`commit` the drafter's KV cache.
"""


@dataclass(frozen=True)
class RequestRound:
    """One request's share of a round."""

    rid: str
    accepted: int
    """Drafts that the target confirmed, those behind a stop included: SGLang's `spec_num_correct_drafts`."""
    committed: int
    """Tokens that the answer grew by, the target's own included, those behind a stop left out."""
    branching_nodes: int
    """Nodes of its tree with two children or more, the root included."""
    depth: int
    """Depth of its tree's deepest node."""


@dataclass(frozen=True)
class Round:
    """A round of a batch."""

    requests: Sequence[RequestRound]
    discarded: int
    """Requests that were computed too, but had ended before: overlap scheduling learns of an end one round late."""
    budget: int
    """Nodes of each tree, the root not counted."""
    cuda_graph: bool
    """Whether the target's forward was a CUDA graph's replay."""
    seconds: Mapping[str, float]
    """Time of each stage, of the device where there is one; a stage whose time is not known is left out."""

    @property
    def rows(self) -> int:
        """Rows of the target's forward."""
        return (len(self.requests) + self.discarded) * (self.budget + 1)

    @property
    def nodes(self) -> int:
        """Drafts that were verified for the requests that count."""
        return len(self.requests) * self.budget


def describe(done: Round) -> dict[str, Any]:
    """The round's numbers as the round log writes them, sums over the requests that count.

    `accept_histogram[k]` is the number of requests with k accepted drafts, `depth` that of the deepest tree.
    """
    accepted = Counter(request.accepted for request in done.requests)
    return {
        "sequences": len(done.requests),
        "discarded": done.discarded,
        "rows": done.rows,
        "committed": sum(request.committed for request in done.requests),
        "accept_histogram": [accepted[k] for k in range(max(accepted, default=-1) + 1)],
        "nodes": done.nodes,
        "branching_nodes": sum(request.branching_nodes for request in done.requests),
        "depth": max((request.depth for request in done.requests), default=0),
        "cuda_graph": done.cuda_graph,
        "seconds": {stage: round(value, 7) for stage, value in done.seconds.items()},
        "requests": {
            name: [getattr(request, name) for request in done.requests] for name in RequestRound.__dataclass_fields__
        },
    }
