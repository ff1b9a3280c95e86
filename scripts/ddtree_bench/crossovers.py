"""Where AR overtakes: the concurrencies at which the ratio of a configuration's throughput to AR's passes 1.

Between two measured concurrencies the logarithm of the ratio is taken as linear in the logarithm of the concurrency.

References
----------
.. [1] Fieller: Some problems in interval estimation, J. R. Statistical Society B 16 (1954): the interval of a root
   holds the places at which a t-test does not reject that the curve is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t as student

from ddtree_bench.columns import ALONG
from ddtree_bench.comparisons import CONFIGURATION, configuration_of, run_ratios
from ddtree_bench.stats import CONFIDENCE, MIN_REPEATS

CURVE = tuple(name for name in CONFIGURATION if name not in ALONG)
"""What the cells of one curve share."""
POINTS = 1000
"""Places between two measured concurrencies at which the interval is looked for: it is known to 0.1 %."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Crossing:
    """A place where a ratio passes 1, or, with `at` NaN, the places at which it may do so although none was seen.

    Attributes
    ----------
    at : float
        Requests in flight at which the interpolated ratio is 1; NaN when no two neighbours lie on both sides of 1.
    falls : bool
        Whether the ratio falls below 1 there, so that AR overtakes; with `at` NaN, whether it is below 1 throughout.
    low, high : float
        Ends of the interval, in requests in flight; NaN when there is none.
    low_open, high_open : bool
        Whether an end is only the end of what was measured.
    between : (int, int) or None
        The measured neighbours of the crossing.
    """

    at: float
    falls: bool
    low: float
    high: float
    low_open: bool = False
    high_open: bool = False
    between: tuple[int, int] | None = None


def crossings(concurrencies: Sequence[int], log_ratios: Floats) -> list[Crossing]:
    """Find where the mean of the runs' log-ratios passes 0, at least one entry.

    The interval holds the concurrencies around the crossing at which the two-sided 95 % t-test over runs does not
    reject that the ratio is 1 [1]_: a run's own log-ratio there is interpolated between its neighbours. Below
    `MIN_REPEATS` runs it is the bracket of the two measured neighbours.

    Parameters
    ----------
    concurrencies : sequence of int, length m >= 1
        Ascending.
    log_ratios : ndarray, shape (n, m)
        Natural logarithm of the ratio, a row a run (a pair of runs of one repeat).

    Examples
    --------
    >>> found = crossings([1, 2, 4], np.log([[1.6, 1.25, 0.8], [1.5, 1.2, 0.82], [1.7, 1.3, 0.79]]))
    >>> [(round(one.low, 2), round(one.at, 2), round(one.high, 2)) for one in found]
    [(2.67, 2.84, 2.92)]
    """
    places = np.log2(np.asarray(concurrencies, dtype=float))
    means = log_ratios.mean(axis=0)
    grid = _grid(places)
    possible = _possible(grid, places, log_ratios) if len(log_ratios) >= MIN_REPEATS else None
    found = []
    for i, (left, right) in enumerate(pairwise(means)):
        if (left < 0) != (right < 0):
            at = places[i] + left / (left - right) * (places[i + 1] - places[i])
            between = (concurrencies[i], concurrencies[i + 1])
            found.append(_crossing(float(at), bool(right < 0), between, grid, possible))
    return found or [_none(bool(means[0] < 0), grid, possible)]


def _grid(places: Floats) -> Floats:
    parts = [np.linspace(a, b, POINTS, endpoint=False) for a, b in pairwise(places)]
    return np.concatenate([*parts, places[-1:]])


def _possible(grid: Floats, places: Floats, log_ratios: Floats) -> NDArray[np.bool_]:
    """Where the t-test over runs does not reject a log-ratio of 0."""
    runs = np.array([np.interp(grid, places, run) for run in log_ratios])
    error = runs.std(axis=0, ddof=1) / np.sqrt(len(runs))
    return np.abs(runs.mean(axis=0)) <= student.ppf((1 + CONFIDENCE) / 2, len(runs) - 1) * error


def _crossing(
    at: float, falls: bool, between: tuple[int, int], grid: Floats, possible: NDArray[np.bool_] | None
) -> Crossing:
    if possible is None:
        return Crossing(2**at, falls, between[0], between[1], between=between)
    above = int(np.searchsorted(grid, at))
    first, last = above, above - 1
    while first > 0 and possible[first - 1]:
        first -= 1
    while last < len(grid) - 1 and possible[last + 1]:
        last += 1
    low, high = min(at, float(grid[min(first, len(grid) - 1)])), max(at, float(grid[last]))
    return Crossing(2**at, falls, 2**low, 2**high, first == 0, last == len(grid) - 1, between)


def _none(below: bool, grid: Floats, possible: NDArray[np.bool_] | None) -> Crossing:
    if possible is None or not possible.any():
        return Crossing(float("nan"), below, float("nan"), float("nan"))
    within = grid[possible]
    ends = float(2 ** within[0]), float(2 ** within[-1])
    return Crossing(float("nan"), below, *ends, bool(possible[0]), bool(possible[-1]))


def crossover_rows(cells: pd.DataFrame, speedup: pd.DataFrame, requests: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of the crossovers table: one row a configuration and crossing, one for a configuration without any.

    Only closed loops have a concurrency to cross at.

    Parameters
    ----------
    cells, speedup, requests : DataFrame
        The tables of these names.
    """
    rows = []
    cells = cells[cells["load_kind"] == "closed"]
    against_ar = speedup[(speedup["baseline"] == "AR") & (speedup["load_kind"] == "closed")]
    for _, curve in against_ar.groupby(list(CURVE), dropna=False, sort=False):
        shared = {name: value for name, value in configuration_of(curve).items() if name in CURVE}
        shared |= _common_prompts(curve, cells, requests)
        rows += [shared | row for row in _rows(curve.sort_values("concurrency"), cells)]
    return rows


def _rows(curve: pd.DataFrame, cells: pd.DataFrame) -> list[dict[str, Any]]:
    good = curve[curve["comparison"] == "ok"]
    if good.empty:
        reasons = "; ".join(dict.fromkeys(str(reason) for reason in curve["reason"]))
        return [{"outcome": "no_ratio", "n_concurrencies": 0, "reason": reasons}]
    measured = [int(c) for c in good["concurrency"]]
    row = {
        "n_concurrencies": len(measured),
        "measured_from": measured[0],
        "measured_to": measured[-1],
        "pairing": "paired" if (good["pairing"] == "paired").all() else "unpaired",
    }
    runs = _runs(good, cells)
    enough = runs is not None and len(runs) >= MIN_REPEATS
    row["n"] = int(good["n"].min()) if runs is None else len(runs)
    if len(measured) == 1:
        return [row | {"outcome": "one_concurrency"}]
    log_ratios = runs if enough and runs is not None else np.log(good[["speedup"]].to_numpy(dtype=float)).T
    found = crossings(measured, log_ratios)
    return [row | _columns(one, number, enough) for number, one in enumerate(found, 1)]


def _runs(good: pd.DataFrame, cells: pd.DataFrame) -> Floats | None:
    """Log-ratios of the pairs of runs that have one at every concurrency, [pairs, concurrencies]; None if unpaired."""
    if (good["pairing"] != "paired").any():
        return None
    by_load = [run_ratios(cells, row).set_index("repeat")["speedup"] for row in good.to_dict("records")]
    return np.log(pd.concat(by_load, axis=1, join="inner").to_numpy(dtype=float))


def _columns(one: Crossing, number: int, enough: bool) -> dict[str, Any]:
    crosses = one.between is not None
    row: dict[str, Any] = {"outcome": "crosses" if crosses else "below" if one.falls else "above"}
    if crosses and one.between is not None:
        row |= {"crossing": number, "direction": "falls" if one.falls else "rises", "crossing_at": one.at}
        row |= {"neighbour_low": one.between[0], "neighbour_high": one.between[1]}
    if one.low == one.low:
        row |= {"crossing_low": one.low, "crossing_high": one.high, "interval": "t" if enough else "bracket"}
        row |= {"low_open": one.low_open, "high_open": one.high_open}
    return row


def _common_prompts(curve: pd.DataFrame, cells: pd.DataFrame, requests: pd.DataFrame) -> dict[str, Any]:
    """Accept length on the prompts that all cells of the curve have: whether decoding was the same along it."""
    first: Mapping[str, Any] = curve.iloc[0]
    where = ["target", "server", "workload", "host_key", "machine_key"]
    mine = cells[(cells[where] == [first[name] for name in where]).all(axis=1)]
    sent = requests.merge(mine[["plan_key", "concurrency"]], on="plan_key")
    prompts = [set(group["prompt_sha256"]) for _, group in sent.groupby("concurrency")]
    if not prompts:
        return {}
    common = set.intersection(*prompts)
    same = sent[sent["prompt_sha256"].isin(common) & (sent["status"] == "ok") & (sent["rounds"] > 0)]
    tokens = (same["accept_length"] * same["rounds"].astype(float)).groupby(same["concurrency"]).sum()
    lengths = tokens / same["rounds"].astype(float).groupby(same["concurrency"]).sum()
    columns: dict[str, Any] = {"common_prompts": len(common)}
    if len(lengths):
        columns |= {"accept_length_common_low": lengths.min(), "accept_length_common_high": lengths.max()}
    return columns
