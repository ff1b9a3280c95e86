"""Where running requests keep their keys and values: one region of slots each, taken and given back whole.

A region holds the longest context there is, so a request never runs out of memory in the middle of its answer; pages
of the process are only touched as slots are written. With prefix reuse on, a region that was given back still holds
what it held, and a new prompt begins behind what it shares with it: in place where that is most of what the region
holds, else in the region that was given back first, to which the shared slots are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Region:
    """Slots from `base` on; `tokens` are those whose keys and values a former request has left in the first of them."""

    base: int
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loan:
    """A region for a prompt whose first `cached` tokens are known: they lie in the slots from `source` on."""

    region: Region
    cached: int
    source: int


class KVPool:
    """Hands out `regions` regions of `slots` slots each."""

    def __init__(self, regions: int, slots: int, reuse_prefixes: bool = False) -> None:
        self.total = regions
        self.slots = slots
        self.reuse_prefixes = reuse_prefixes
        self._free = [Region(index * slots) for index in range(regions)]

    @property
    def free(self) -> int:
        """Regions that no request holds."""
        return len(self._free)

    def take(self, prompt: Sequence[int]) -> Loan | None:
        """A region for `prompt`; None when all are taken.

        At least one token is left to compute: its hidden state decides the first token of the answer.
        """
        if not self._free:
            return None
        shared = [min(_common_prefix(region.tokens, prompt), len(prompt) - 1) for region in self._free]
        best = max(range(len(shared)), key=lambda i: (shared[i], -i))
        source, cached = self._free[best], shared[best]
        in_place = cached == 0 or 2 * cached >= len(source.tokens) or len(self._free) == 1
        oldest = next(i for i in range(len(self._free)) if i != best) if not in_place else best
        return Loan(self._free.pop(oldest), cached, source.base)

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
