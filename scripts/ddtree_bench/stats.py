"""From runs to claims: intervals, ratios, several comparisons, and what a number of runs can show.

The unit is the run (one fresh server start). Requests inside a run are never pooled into an interval: with a
between-run deviation of 3 % a nominal 95 % interval over pooled requests covers 60 %.

References
----------
.. [1] Hoefler, Belli: Scientific Benchmarking of Parallel Computing Systems, SC15, doi 10.1145/2807591.2807644.
.. [2] Kalibera, Jones: Rigorous Benchmarking in Reasonable Time, ISMM 2013, doi 10.1145/2464157.2464160.
.. [3] Welch: The generalization of "Student's" problem when several different population variances are involved,
   Biometrika 34 (1947), doi 10.1093/biomet/34.1-2.28.
.. [4] Holm: A simple sequentially rejective multiple test procedure, Scand. J. Statistics 6 (1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

MIN_REPEATS = 3
"""Fewest runs that get an interval."""

MIN_CLAIM = 5
"""Fewest runs that a claim may stand on."""

CONFIDENCE = 0.95
"""Confidence of every interval in tables and figures."""

FREE_KEYS = ("method", "budget", "topk_cap")
"""What a cell may differ in from its baseline; everything else must agree."""

DRAFTER_KEYS = ("drafter", "drafter_revision", "host_key", "block_size")
"""What a cell may differ in from a baseline without a drafter (the host key covers the drafter's content)."""


class UnlikeCells(ValueError):
    """A ratio of cells that differ in more than the method; `keys` names what differs."""

    def __init__(self, keys: Sequence[str], detail: str) -> None:
        super().__init__(detail)
        self.keys = tuple(keys)


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided interval.

    Attributes
    ----------
    estimate, low, high : float
        In the unit of the values. `low` and `high` are NaN when there are too few runs.
    n : int
        Runs, or pairs of runs, that the estimate stands on (of the method, when unpaired).
    p_value : float
        Two-sided p-value of "the ratio is 1" for ratios; NaN for means and without an interval.
    """

    estimate: float
    low: float
    high: float
    n: int
    p_value: float = float("nan")


def _positive(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a non-empty list of run values, its shape is {array.shape}")
    if not np.all(np.isfinite(array)) or np.any(array <= 0):
        raise ValueError(f"{name} must be positive and finite for a ratio, it is {array.tolist()}")
    return array


def mean_interval(values: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Mean of run values with Student's t-interval.

    ``mean +- t(1 - a/2, n - 1) * s / sqrt(n)``, s the sample standard deviation.

    Parameters
    ----------
    values : array_like, shape (n,)
        One value a run, any unit. NaN (a run without this value) is left out.
    confidence : float
        Nominal coverage, in (0, 1).

    Returns
    -------
    Interval
        In the unit of `values`; without bounds below `MIN_REPEATS` runs, all NaN for no run at all.

    Examples
    --------
    >>> interval = mean_interval([100.0, 103.0, 97.0])
    >>> round(interval.low, 2), interval.estimate, round(interval.high, 2), interval.n
    (92.55, 100.0, 107.45, 3)
    """
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    n = int(array.size)
    if n == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    mean = float(array.mean())
    if n < MIN_REPEATS:
        return Interval(mean, float("nan"), float("nan"), n)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * array.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def paired_ratio(numerator: ArrayLike, denominator: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Geometric mean of paired ratios with the t-interval of the log-ratio.

    Parameters
    ----------
    numerator, denominator : array_like, shape (n,)
        Run values, positive, same unit; position i of both is one pair (same repeat, workload, load and block).
    confidence : float
        Nominal coverage, in (0, 1).

    Returns
    -------
    Interval
        Dimensionless; `p_value` is that of the paired t-test on the logs.

    Raises
    ------
    ValueError
        Lengths differ, no pair, or a value that is not positive and finite.

    Examples
    --------
    >>> ratio = paired_ratio([210.0, 190.0, 202.0], [100.0, 100.0, 100.0])
    >>> round(ratio.low, 3), round(ratio.estimate, 3), round(ratio.high, 3)
    (1.769, 2.005, 2.273)
    """
    top, bottom = _positive(numerator, "numerator"), _positive(denominator, "denominator")
    if top.shape != bottom.shape:
        raise ValueError(f"pairs need equal lengths, there are {top.size} numerators and {bottom.size} denominators")
    logs = np.log(top) - np.log(bottom)
    spread = float(logs.std(ddof=1) / np.sqrt(logs.size)) if logs.size > 1 else float("nan")
    return _from_logs(float(logs.mean()), spread, logs.size - 1, int(logs.size), logs.size >= MIN_REPEATS, confidence)


def welch_ratio(numerator: ArrayLike, denominator: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Ratio of geometric means of unpaired runs, with Welch's interval on the logs.

    For runs that were not measured in one block (a budget added next week against last week's baseline): what
    changed between the blocks is part of the ratio, so the result is to be marked as unpaired.

    Parameters
    ----------
    numerator, denominator : array_like, shapes (n,) and (m,)
        Run values, positive, same unit.
    confidence : float
        Nominal coverage, in (0, 1).

    Returns
    -------
    Interval
        Dimensionless, `n` runs of the numerator; without bounds when either side has fewer than `MIN_REPEATS` runs.

    Raises
    ------
    ValueError
        A side is empty or holds a value that is not positive and finite.

    Examples
    --------
    >>> ratio = welch_ratio([210.0, 190.0, 202.0], [100.0, 98.0, 102.0])
    >>> round(ratio.low, 3), round(ratio.estimate, 3), round(ratio.high, 3)
    (1.799, 2.005, 2.235)
    """
    top, bottom = np.log(_positive(numerator, "numerator")), np.log(_positive(denominator, "denominator"))
    difference = float(top.mean() - bottom.mean())
    enough = min(top.size, bottom.size) >= MIN_REPEATS
    if not enough:
        return _from_logs(difference, float("nan"), 1, int(top.size), False, confidence)
    parts = np.array([top.var(ddof=1) / top.size, bottom.var(ddof=1) / bottom.size])
    total = float(parts.sum())
    freedom = total**2 / float((parts**2 / np.array([top.size - 1, bottom.size - 1])).sum()) if total > 0 else 1.0
    return _from_logs(difference, float(np.sqrt(total)), freedom, int(top.size), True, confidence)


def _from_logs(log: float, spread: float, freedom: float, n: int, enough: bool, confidence: float) -> Interval:
    estimate = float(np.exp(log))
    if not enough:
        return Interval(estimate, float("nan"), float("nan"), n)
    half = float(stats.t.ppf((1 + confidence) / 2, freedom)) * spread
    p_value = float(2 * stats.t.sf(abs(log) / spread, freedom)) if spread > 0 else float(log == 0.0)
    return Interval(estimate, float(np.exp(log - half)), float(np.exp(log + half)), n, p_value)


def differing_keys(cell: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """Keys in which a cell and its baseline differ although a ratio needs them equal, sorted.

    Free are `FREE_KEYS` and, against AR, which drafts nothing, `DRAFTER_KEYS`.

    Parameters
    ----------
    cell, baseline : mapping
        Join keys: everything that a measured number may depend on except the repeat; None for "has none".

    Examples
    --------
    >>> differing_keys({"method": "DDTREE", "concurrency": 32}, {"method": "AR", "concurrency": 8})
    ['concurrency']
    """
    free = set(FREE_KEYS)
    if cell.get(DRAFTER_KEYS[0]) is None or baseline.get(DRAFTER_KEYS[0]) is None:
        free.update(DRAFTER_KEYS)
    return [key for key in sorted({*cell, *baseline} - free) if cell.get(key) != baseline.get(key)]


def require_like(cell: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Raise `UnlikeCells`, naming each differing key with both values, unless a ratio of the two means something.

    Examples
    --------
    >>> require_like({"concurrency": 32}, {"concurrency": 8})
    Traceback (most recent call last):
        ...
    ddtree_bench.stats.UnlikeCells: no ratio of unlike cells: concurrency is 32 against 8 of the baseline
    """
    found = differing_keys(cell, baseline)
    if found:
        parts = ", ".join(f"{key} is {cell.get(key)} against {baseline.get(key)} of the baseline" for key in found)
        raise UnlikeCells(found, f"no ratio of unlike cells: {parts}")


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's step-down adjusted p-values for comparisons that were named beforehand.

    ``adjusted(i) = max over j <= i of min(1, (m - j + 1) * p(j))`` in ascending order of p.

    Parameters
    ----------
    p_values : array_like, shape (m,)
        NaN (a comparison without a test) stays NaN and counts as one of the m: it was named beforehand too.

    Returns
    -------
    ndarray, shape (m,)
        In the order of the input.

    Examples
    --------
    >>> [round(float(p), 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    adjusted = np.full(p.shape, np.nan)
    highest = 0.0
    for step, index in enumerate(np.argsort(p, kind="stable")):
        if np.isnan(p[index]):
            continue
        highest = max(highest, min(1.0, (p.size - step) * float(p[index])))
        adjusted[index] = highest
    return adjusted


def half_width(run_sd: float, repeats: int, comparisons: int = 1, confidence: float = CONFIDENCE) -> float:
    """Half-width of the interval of a paired log-ratio, before anything is measured.

    Parameters
    ----------
    run_sd : float
        Standard deviation of one run's log value (0.03 is 3 %); a ratio of two runs has sqrt(2) times that.
    repeats : int
        Pairs planned, at least 2.
    comparisons : int
        Comparisons named beforehand; the interval is that of Holm's first step, 1 - (1 - confidence) / comparisons.
    confidence : float
        Nominal coverage of a single comparison.

    Returns
    -------
    float
        In units of the log-ratio: close to the relative change while it is small.

    Examples
    --------
    >>> round(half_width(0.03, 3), 3), round(half_width(0.03, 3, comparisons=7), 2)
    (0.105, 0.29)
    """
    _check_plan(run_sd, repeats, comparisons)
    quantile = stats.t.ppf(1 - (1 - confidence) / (2 * comparisons), repeats - 1)
    return float(quantile * np.sqrt(2 / repeats) * run_sd)


def least_detectable_effect(
    run_sd: float, repeats: int, comparisons: int = 1, power: float = 0.8, confidence: float = CONFIDENCE
) -> float:
    """Smallest true speed-up that the paired test finds with probability `power`.

    Solved on the noncentral t distribution with noncentrality ``log(1 + effect) / (run_sd * sqrt(2 / repeats))``.

    Parameters
    ----------
    run_sd, repeats, comparisons, confidence
        As for `half_width`.
    power : float
        Probability of finding the effect, in (0.05, 1).

    Returns
    -------
    float
        Effect as a fraction: 0.1 is a speed-up of 1.1.

    Examples
    --------
    >>> round(least_detectable_effect(0.03, 5), 3), round(least_detectable_effect(0.03, 10), 3)
    (0.074, 0.043)
    """
    _check_plan(run_sd, repeats, comparisons)
    freedom = repeats - 1
    critical = stats.t.ppf(1 - (1 - confidence) / (2 * comparisons), freedom)

    def missing_power(noncentrality: float) -> float:
        return float(stats.nct.sf(critical, freedom, noncentrality)) - power

    noncentrality = optimize.brentq(missing_power, 0.0, 20.0 * float(critical) + 20.0)
    return float(np.expm1(noncentrality * run_sd * np.sqrt(2 / repeats)))


def _check_plan(run_sd: float, repeats: int, comparisons: int) -> None:
    if repeats < 2:
        raise ValueError(f"repeats is {repeats}: a deviation between runs needs at least 2")
    if run_sd <= 0:
        raise ValueError(f"run_sd is {run_sd}: give the deviation of one run's log value, for example 0.03")
    if comparisons < 1:
        raise ValueError(f"comparisons is {comparisons}: there is at least 1")
