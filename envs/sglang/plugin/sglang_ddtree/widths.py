"""The two widths of a round: rows that the target verifies, and rows that the draft model runs, for each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Widths:
    """Rows a request in the two forwards of a round.

    The draft model runs on `block` rows (the anchor and block - 1 masks), whatever the budget; the target verifies
    the root and `budget` nodes. A buffer sized by one and filled by the other is the fault that crashed earlier
    implementations (block 8, budget 32: 8 rows reserved, 33 written).
    """

    block: int
    budget: int

    @classmethod
    def resolved(cls, spec: Any) -> Widths:
        """The widths in SGLang's resolved arguments, which keep them as block size and as rows of the target."""
        return cls(int(spec.speculative_dflash_block_size), int(spec.speculative_num_draft_tokens) - 1)

    @property
    def draft(self) -> int:
        """Rows of the draft forward."""
        return self.block

    @property
    def verify(self) -> int:
        """Rows of the target's forward."""
        return self.budget + 1

    @property
    def depth(self) -> int:
        """The deepest a node can lie: no deeper than the block drafts, nor than there are nodes."""
        return min(self.block - 1, self.budget)

    @property
    def reserve(self) -> int:
        """KV slots that a round writes behind the committed tokens: both forwards start there."""
        return max(self.verify, self.draft)
