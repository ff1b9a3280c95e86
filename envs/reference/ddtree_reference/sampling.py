"""How a next token is drawn from the target's logits: greedily, or at a temperature with top-k and top-p.

Every token of an answer has a uniform number of its own, decided by the request's seed and the token's place alone. So
a seed gives one text, whatever the method, the batch or the load: where a tree node's logits equal those of
autoregressive decoding bit for bit, the token drawn there does too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request; temperature 0 is greedy, top_k -1 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of its bounds, naming it."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature}: at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: above 0, at most 1")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k}: at least 1, or -1 for no limit")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed}: at least 0")

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without drawing."""
        return self.temperature == 0


GREEDY = Sampling()


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) that decide the first `count` tokens of an answer; a longer list begins with the same."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


def distribution(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """What a token is drawn from: token ids and their probabilities, fp64 [kept] each, for `scores` [vocab].

    top_k and top_p both apply to the distribution at the temperature: kept are the top_k most probable tokens that also
    belong to the smallest set of most probable ones whose mass reaches top_p, and their probabilities are made to sum
    to 1.
    """
    probabilities = torch.softmax(scores.float() / sampling.temperature, -1)
    ids = torch.arange(len(probabilities))
    if sampling.top_p < 1:
        # tokens below this have less than 1 - top_p in sum, so that none of them can be needed to reach top_p
        negligible = min((1 - sampling.top_p) / len(probabilities), float(probabilities.max()))
        ids = torch.nonzero(probabilities >= negligible)[:, 0]
    if sampling.top_p < 1 or 0 < sampling.top_k < len(ids):
        best = probabilities[ids].sort(descending=True, stable=True)
        kept = best.values.double()
        n_kept = len(kept)
        if sampling.top_p < 1:
            before = kept.cumsum(0) - kept
            n_kept = max(1, int((before < sampling.top_p).sum()))
        n_kept = min(n_kept, sampling.top_k) if sampling.top_k > 0 else n_kept
        return ids[best.indices[:n_kept]], kept[:n_kept] / kept[:n_kept].sum()
    exact = probabilities.double()
    return ids, exact / exact.sum()


@torch.inference_mode()
def draw(scores: Tensor, sampling: Sampling, uniform: float) -> int:
    """The token that `uniform` draws from logits `scores` [vocab], by inverting the cumulative distribution."""
    ids, probabilities = distribution(scores, sampling)
    place = int(torch.searchsorted(probabilities.cumsum(0), uniform, right=True))
    return int(ids[min(place, len(ids) - 1)])
