"""When requests are sent: the scheduled starts of an open loop, and the staggered first starts of a closed one."""

from __future__ import annotations

import numpy as np

from ddtree_bench.plan import Load

STAGGER_S = 0.005
"""Pause between the first sends of two users of a closed loop: without it the first wave measures a storm of
connections and prefills that no later moment of the cell resembles."""


def intended_starts(load: Load, requests: int, seed: int) -> list[float] | None:
    """Return the scheduled start of every request, s from the start of the cell; None for a closed loop.

    Constant arrivals are 1 / rate apart, Poisson arrivals have exponential intervals with that mean; the first request
    starts at 0. Raises ValueError for an open loop without a positive rate.
    """
    if load.kind == "closed":
        return None
    if not load.rate or load.rate <= 0:
        raise ValueError(f"rate: {load.rate}; an open loop needs a rate above 0 requests/s")
    if load.arrivals == "constant":
        return [number / load.rate for number in range(requests)]
    intervals = np.random.default_rng(seed).exponential(1 / load.rate, size=requests)
    intervals[:1] = 0.0
    starts: list[float] = np.cumsum(intervals).tolist()
    return starts
