"""Percentiles by nearest rank, and the least number of values from which one may be given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    weight = None if weights is None else np.asarray(weights, dtype=float)
    return _nearest_ranks(np.asarray(values, dtype=float), [percent], weight)[0]


def _nearest_ranks(
    data: NDArray[np.float64], percents: Sequence[float], weights: NDArray[np.float64] | None
) -> list[float | None]:
    """The values of several ranks, sorting once."""
    if not data.size:
        return [None] * len(percents)
    if weights is None:
        ordered = np.sort(data)
        return [float(ordered[max(1, math.ceil(percent * data.size / 100)) - 1]) for percent in percents]
    order = np.argsort(data)
    below = np.cumsum(weights[order])
    ranks = np.searchsorted(below, [percent * below[-1] / 100 for percent in percents], side="left")
    return [float(data[order[rank]]) for rank in ranks]


def summary(name: str, values: ArrayLike, weights: ArrayLike | None = None) -> dict[str, float | None]:
    """Return `{name}_mean_s` and `{name}_p50_s`, ... of values in seconds, NA where there are too few.

    Mean and percentiles are weighted by `weights`; the number of values decides whether a percentile may be given.
    """
    data = np.asarray(values, dtype=float)
    weight = None if weights is None else np.asarray(weights, dtype=float)
    mean = float(np.average(data, weights=weight)) if data.size else None
    ranks = _nearest_ranks(data, GIVEN, weight)
    return {f"{name}_mean_s": mean} | {
        f"{name}_p{percent}_s": value if data.size >= least_n(percent) else None
        for percent, value in zip(GIVEN, ranks, strict=True)
    }
