"""AR, DFLASH or DDTREE with its numbers: how a server proposes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["AR", "DFLASH", "DDTREE"]

MAX_BUDGET = 1024


@dataclass(frozen=True)
class Method:
    """How tokens are proposed. `budget` counts tree nodes without the root, `topk_cap` the tokens kept a depth."""

    algorithm: Algorithm = "AR"
    block_size: int = 8
    budget: int = 8
    topk_cap: int = 8

    def __post_init__(self) -> None:
        """Raise ValueError for numbers no engine can run, naming the value and the bounds."""
        if self.block_size < 2:
            raise ValueError(f"block size {self.block_size}: at least 2, the anchor and one draft")
        if not 1 <= self.budget <= MAX_BUDGET:
            raise ValueError(f"budget {self.budget}: 1 to {MAX_BUDGET}")
        if self.topk_cap < 1:
            raise ValueError(f"top-k cap {self.topk_cap}: at least 1")

    @property
    def verify_width(self) -> int:
        """Rows of a sequence's target forward: 1 for AR, the block for DFLASH, budget + 1 for DDTREE."""
        return {"AR": 1, "DFLASH": self.block_size, "DDTREE": self.budget + 1}[self.algorithm]

    @property
    def rows(self) -> int:
        """Rows a forward really has: verify_width, or fewer where the cap leaves no more paths."""
        if self.algorithm != "DDTREE":
            return self.verify_width
        return 1 + min(self.budget, sum(self.effective_cap**depth for depth in range(1, self.block_size)))

    @property
    def effective_cap(self) -> int:
        """The cap that can matter: a node of rank r has r better siblings in the tree, so ranks stay below budget."""
        return min(self.topk_cap, self.budget)
