"""What a load client is asked to measure: one cell, and where its server is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_bench.load.exchange import Limits
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Load, Workload


@dataclass(frozen=True)
class CellWork:
    """The requests of one cell and the server that they go to.

    `seed` is that of Poisson arrivals. `headers` are sent with every request and may hold a key.
    """

    base_url: str
    model: str
    workload: Workload
    load: Load
    prompts: tuple[Prompt, ...]
    limits: Limits
    seed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.workload.name} at {self.load.name}"


def from_tree(tree: Mapping[str, Any]) -> CellWork:
    """Return the work of which JSON holds the fields. Raises TypeError or KeyError for another tree."""
    blocks = tree["workload"]["blocks"]
    parts = {
        "workload": Workload(**{**tree["workload"], "blocks": None if blocks is None else tuple(blocks)}),
        "load": Load(**tree["load"]),
        "prompts": tuple(_prompt(one) for one in tree["prompts"]),
        "limits": Limits(**tree["limits"]),
    }
    return CellWork(**{**tree, **parts})


def _prompt(tree: Mapping[str, Any]) -> Prompt:
    messages = tree["messages"]
    return Prompt(**{**tree, "messages": None if messages is None else tuple(messages)})
