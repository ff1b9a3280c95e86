"""Percentiles by nearest rank, and the least number of values from which one may be given."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

GIVEN = (50, 90, 99)
"""The percentiles that tables hold."""

_MISS = 0.025


def least_n(percent: float) -> int:
    """Return the least number of values from which a percentile above the median may be given.

    With n values the largest lies above the q-quantile with probability 1 - q^n. The least n makes that 97.5 %, so that
    the percentile is bounded by a value that was seen: 36 for p90, 368 for p99. The median is always given.

    >>> least_n(90), least_n(99), least_n(50)
    (36, 368, 1)
    """
    return 1 if percent <= 50 else math.ceil(math.log(_MISS) / math.log(percent / 100))


def nearest_rank(values: ArrayLike, percent: float, weights: ArrayLike | None = None) -> float | None:
    """Return the smallest value at or below which `percent` % of the values (or of the weight) lie; None without any.

    The nearest-rank definition: for n unweighted values the one of rank ceil(percent / 100 * n), counted from 1.

    >>> nearest_rank([15, 20, 35, 40, 50], 30)
    20.0
    >>> nearest_rank([1.0, 9.0], 50, weights=[1, 3])
    9.0
    """
    data = np.asarray(values, dtype=float)
    if not data.size:
        return None
    weight = np.ones_like(data) if weights is None else np.asarray(weights, dtype=float)
    order = np.argsort(data, kind="stable")
    below = np.cumsum(weight[order])
    # Scaled by 100 and not divided, so that whole ranks are compared exactly.
    rank = int(np.searchsorted(below * 100, percent * below[-1], side="left"))
    return float(data[order][rank])


def summary(name: str, values: ArrayLike, weights: ArrayLike | None = None) -> dict[str, float | None]:
    """Return `{name}_mean_s` and `{name}_p50_s`, ... of values in seconds, NA where there are too few.

    Mean and percentiles are weighted by `weights`; the number of values decides whether a percentile may be given.
    """
    data = np.asarray(values, dtype=float)
    weight = None if weights is None else np.asarray(weights, dtype=float)
    mean = float(np.average(data, weights=weight)) if data.size else None
    return {f"{name}_mean_s": mean} | {
        f"{name}_p{percent}_s": nearest_rank(data, percent, weights) if data.size >= least_n(percent) else None
        for percent in GIVEN
    }
