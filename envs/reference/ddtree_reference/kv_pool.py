"""Where running requests keep their keys and values: one region of slots each, taken and given back whole.

A region holds the longest context there is, so a request never runs out of memory in the middle of its answer; pages
of the process are only touched as slots are written. A region that was given back still holds what it held: with
prefix reuse on, a new prompt gets the free region with which it shares the longest beginning, and starts behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Region:
    """Slots `base` .. `base + size - 1` of the pool's tensors; `tokens` are those a former request has left in them."""

    base: int
    size: int
    tokens: list[int] = field(default_factory=list)


class KVPool:
    """Hands out `regions` regions of `slots` slots each."""

    def __init__(self, regions: int, slots: int, reuse_prefixes: bool = False) -> None:
        self.slots = slots
        self.reuse_prefixes = reuse_prefixes
        self._free = [Region(index * slots, slots) for index in range(regions)]
        self._total = regions

    @property
    def total(self) -> int:
        """Regions of the pool."""
        return self._total

    @property
    def free(self) -> int:
        """Regions that no request holds."""
        return len(self._free)

    def take(self, prompt: Sequence[int]) -> tuple[Region, int] | None:
        """A region for `prompt` and how many of the prompt's tokens it holds already; None when all are taken.

        At least one token is left to compute: its hidden state decides the first token of the answer. Of regions that
        share nothing the one that was given back first is taken.
        """
        if not self._free:
            return None
        shared = [min(_common_prefix(region.tokens, prompt), len(prompt) - 1) for region in self._free]
        best = max(range(len(shared)), key=lambda i: (shared[i], -i))
        return self._free.pop(best), shared[best]

    def give_back(self, region: Region, tokens: Sequence[int]) -> None:
        """Return a region whose slots hold keys and values of `tokens`."""
        region.tokens = list(tokens) if self.reuse_prefixes else []
        self._free.append(region)

    def flush(self) -> None:
        """Forget what free regions hold."""
        for region in self._free:
            region.tokens = []


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
