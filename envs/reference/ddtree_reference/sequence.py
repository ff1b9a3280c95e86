"""A request and the sequence of tokens it becomes while it is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddtree_reference.kv_pool import Region
from ddtree_reference.sampling import GREEDY, Sampling, uniforms


@dataclass(frozen=True)
class Request:
    """What is to be decoded; `eos` None means never to stop there, `top_logprobs` None that none are wanted."""

    prompt: tuple[int, ...]
    max_tokens: int
    eos: int | None = None
    sampling: Sampling = GREEDY
    top_logprobs: int | None = None


@dataclass(eq=False)
class Running:
    """A request that is being decoded, with a region of the KV cache.

    `tokens` are prompt and answer so far, of which `filled` have their keys and values in the region: while the answer
    is decoded, all but the last. `cached` of the prompt's tokens were there from the start.
    """

    request: Request
    region: Region
    cached: int = 0
    filled: int = field(init=False)
    tokens: list[int] = field(init=False)
    uniforms: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.filled = self.cached
        self.tokens = list(self.request.prompt)
        greedy = self.request.sampling.greedy
        self.uniforms = uniforms(self.request.sampling.seed, 0 if greedy else self.request.max_tokens)

    @property
    def answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been computed and the first token chosen."""
        return self.answered > 0

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, with `eos` or with max_tokens."""
        return self.answered >= self.request.max_tokens or (self.prefilled and self.tokens[-1] == self.request.eos)

    def append(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Append committed tokens, cut behind the first `eos` and at max_tokens; returns those that stay."""
        kept = tokens[: self.request.max_tokens - self.answered]
        if self.request.eos in kept:
            kept = kept[: kept.index(self.request.eos) + 1]
        self.tokens += kept
        return kept
