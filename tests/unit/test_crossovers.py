"""Where AR overtakes: known crossings, how often their intervals hold the truth, and the rows of the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student
from store_factory import AR, SMALL, build, one, tree

from ddtree_bench import columns, comparisons, tables
from ddtree_bench.crossovers import crossings, crossover_rows

LOADS = (1, 2, 4, 8)
SWEEP = replace(SMALL, servers=(AR, tree(8), tree(64)), concurrencies=LOADS, n_prompts=8, max_tokens=12)
Frames = dict[str, pd.DataFrame]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    """The tables of AR and two budgets at four concurrencies, three repeats."""
    return build(tmp_path_factory.mktemp("sweep"), SWEEP)


def with_ratio(frames: Frames, ratio: np.ndarray) -> pd.DataFrame:
    """The crossovers table when budget 64 is `ratio` [repeats, concurrencies] times as fast as AR."""
    cells = frames["cells"].query("server != 'ddtree-b8-k8'").copy()
    for (repeat, concurrency), factor in np.ndenumerate(ratio):
        here = (cells["repeat"] == repeat + 1) & (cells["concurrency"] == LOADS[concurrency])
        for name in ("throughput_full_tok_s", "throughput_steady_tok_s"):
            cells.loc[here & (cells["method"] == "AR"), name] = 100.0
            cells.loc[here & (cells["method"] == "DDTREE"), name] = 100.0 * factor
    speedup = tables.typed(comparisons.speedup_rows(cells), "speedup")
    return tables.typed(crossover_rows(cells, speedup, frames["requests"]), "crossovers")


def falling(*factors: float) -> np.ndarray:
    """Ratios that pass 1 at C = 3 when the factor is 1, a repeat a factor."""
    return np.array([[factor * (3 / c) ** 0.5 for c in LOADS] for factor in factors])


def test_a_known_crossing_is_found_where_it_is(sweep: Frames) -> None:
    row = one(with_ratio(sweep, falling(1, 1, 1)), server="ddtree-b64-k8")
    assert (row["outcome"], row["direction"], row["crossing"], row["n"]) == ("crosses", "falls", 1, 3)
    assert row[["crossing_at", "crossing_low", "crossing_high"]].tolist() == pytest.approx([3, 3, 3])
    assert (row["neighbour_low"], row["neighbour_high"], row["measured_from"], row["measured_to"]) == (2, 4, 1, 8)


def test_the_interval_is_where_the_paired_test_does_not_reject_a_ratio_of_one(sweep: Frames) -> None:
    """All runs are parallel on log scales, so the ends are known: log C = log 3 + 2 (mean +- t s / sqrt(n))."""
    factors = np.array([0.96, 1.02, 1.05])
    row = one(with_ratio(sweep, falling(*factors)), server="ddtree-b64-k8")
    mean, half = np.log(factors).mean(), student.ppf(0.975, 2) * np.log(factors).std(ddof=1) / 3**0.5
    expected = [3 * np.exp(2 * (mean + side * half)) for side in (-1, 0, 1)]
    found = row[["crossing_low", "crossing_at", "crossing_high"]].astype(float).tolist()
    assert found == pytest.approx(expected, rel=2e-3)
    assert (row["interval"], row["low_open"], row["high_open"]) == ("t", False, False)


def test_an_interval_that_goes_on_beyond_what_was_measured_is_open(sweep: Frames) -> None:
    row = one(with_ratio(sweep, falling(0.6, 1.0, 1.6)), server="ddtree-b64-k8")
    assert row["crossing_at"] == pytest.approx(3 * 0.96 ** (2 / 3))
    assert (row["crossing_low"], row["crossing_high"]) == (1, 8) and row["low_open"] and row["high_open"]


def test_a_ratio_above_or_below_one_throughout_crosses_nowhere(sweep: Frames) -> None:
    for factor, outcome in ((3.0, "above"), (0.3, "below")):
        row = one(with_ratio(sweep, falling(factor, factor, factor)), server="ddtree-b64-k8")
        assert row["outcome"] == outcome
        assert row[["crossing", "crossing_at", "crossing_low", "interval", "direction"]].isna().all()


def test_a_crossing_that_was_not_seen_but_may_be_there_is_said(sweep: Frames) -> None:
    row = one(with_ratio(sweep, falling(1.55, 1.7, 1.9)), server="ddtree-b64-k8")
    assert row["outcome"] == "above" and np.isnan(row["crossing_at"]) and row["interval"] == "t"
    assert 4 < row["crossing_low"] < 8 and row["crossing_high"] == 8 and row["high_open"] and not row["low_open"]


def test_a_curve_that_crosses_twice_has_two_rows() -> None:
    down, up = crossings(LOADS, np.log([[2.0, 0.5, 0.5, 2.0]]))
    assert (down.at, down.falls, down.between) == (pytest.approx(2**0.5), True, (1, 2))
    assert (up.at, up.falls, up.between) == (pytest.approx(32**0.5), False, (4, 8))


def test_a_ratio_of_exactly_one_is_a_crossing_at_its_concurrency() -> None:
    (found,) = crossings([1, 2, 4], np.log([[2.0, 1.0, 0.5]] * 3))
    assert (found.at, found.low, found.high) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_the_interval_holds_the_true_crossing_as_often_as_it_says(runs: int) -> None:
    """Runs differ by 3 % as a whole, and by 2 % from cell to cell; the true ratio is linear between concurrencies."""
    truth = np.log([1.5, 1.2, 0.85, 0.6])
    true_at = 2 ** (1 + np.log(1.2) / (np.log(1.2) - np.log(0.85)))
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        noise = random.normal(0, 0.03, (2, runs, 1)) + random.normal(0, 0.02, (2, runs, len(LOADS)))
        (found,) = crossings(LOADS, truth + noise[0] - noise[1])
        covered += found.low <= true_at <= found.high
    assert 0.93 <= covered / 1000 <= 0.97


def test_fewer_than_three_pairs_give_the_measured_neighbours(sweep: Frames) -> None:
    kept = {**sweep, "cells": sweep["cells"].query("repeat < 3")}
    row = one(with_ratio(kept, falling(0.9, 1.1)), server="ddtree-b64-k8")
    assert (row["interval"], row["crossing_low"], row["crossing_high"], row["n"]) == ("bracket", 2, 4, 2)
    assert not row["low_open"] and not row["high_open"]


def test_repeats_that_lack_a_concurrency_are_left_out(tmp_path: Path) -> None:
    """Of four repeats one has no cell at C = 8: the interval stands on the three others."""
    frames = build(tmp_path, replace(SWEEP, repeats=4, servers=(AR, tree(64))))
    gone = frames["cells"].query("repeat == 4 and concurrency == 8 and method == 'DDTREE'").index
    cells = frames["cells"].drop(index=gone)
    speedup = tables.typed(comparisons.speedup_rows(cells), "speedup")
    (row,) = crossover_rows(cells, speedup, frames["requests"])
    assert (row["interval"], row["n"], row["n_concurrencies"]) == ("t", 3, 4)


def test_unpaired_ratios_give_the_measured_neighbours(tmp_path: Path) -> None:
    frames = build(tmp_path, replace(SWEEP, servers=(AR, tree(64)), blocks={"ddtree-b64-k8": "later"}))
    (row,) = crossover_rows(frames["cells"], frames["speedup"], frames["requests"])
    assert (row["outcome"], row["pairing"], row["interval"]) == ("crosses", "unpaired", "bracket")


def test_one_concurrency_and_no_baseline_are_outcomes(tmp_path: Path) -> None:
    alone = build(tmp_path / "alone", replace(SWEEP, concurrencies=(4,), repeats=1, servers=(AR, tree(8))))
    (row,) = crossover_rows(alone["cells"], alone["speedup"], alone["requests"])
    assert (row["outcome"], row["measured_from"]) == ("one_concurrency", 4)
    orphan = build(tmp_path / "orphan", replace(SWEEP, concurrencies=(1, 2), repeats=1, servers=(tree(8),)))
    (row,) = crossover_rows(orphan["cells"], orphan["speedup"], orphan["requests"])
    assert (row["outcome"], row["reason"]) == ("no_ratio", "no AR cell in this target, workload and load")


def test_a_concurrency_without_a_run_that_succeeded_is_no_neighbour(sweep: Frames) -> None:
    cells = sweep["cells"].copy()
    cells.loc[(cells["concurrency"] == 2) & (cells["method"] == "AR"), "status"] = "failed"
    speedup = tables.typed(comparisons.speedup_rows(cells), "speedup")
    row = one(tables.typed(crossover_rows(cells, speedup, sweep["requests"]), "crossovers"), server="ddtree-b64-k8")
    assert row["n_concurrencies"] == 3 and row["neighbour_low"] != 2 and row["neighbour_high"] != 2


def test_the_accept_length_stands_on_the_prompts_common_to_all_concurrencies(sweep: Frames) -> None:
    """Eight prompts at each concurrency, but three at C = 1: only these count."""
    cells, requests = sweep["cells"], sweep["requests"]
    first = cells.query("concurrency == 1")["plan_key"]
    few = requests[~(requests["plan_key"].isin(first) & (requests["index"] >= 3))]
    row = next(r for r in crossover_rows(cells, sweep["speedup"], few) if r["budget"] == 64)
    mine = cells.query("server == 'ddtree-b64-k8' and concurrency == 8")["plan_key"]
    same = requests[requests["plan_key"].isin(mine) & (requests["index"] < 3)]
    pooled = ((same["output_tokens"] - 1).sum()) / same["rounds"].sum()
    assert row["common_prompts"] == 3
    assert row["accept_length_common_low"] == pytest.approx(pooled) == row["accept_length_common_high"]


def test_curves_of_different_servers_are_not_mixed(sweep: Frames) -> None:
    rows = tables.typed(crossover_rows(sweep["cells"], sweep["speedup"], sweep["requests"]), "crossovers")
    assert rows["server"].tolist() == ["ddtree-b8-k8", "ddtree-b64-k8"]
    assert set(rows["n_concurrencies"]) == {4}
    assert not set(columns.ALONG) & set(rows.columns)
