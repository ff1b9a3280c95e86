"""Intervals, ratios, corrections and selections against values by hand, by SciPy and by simulation."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from scipy import stats as reference

from ddtree_bench import identical_answers, selection, stats
from ddtree_bench.report import content


def test_examples_in_docstrings_run() -> None:
    for module, least in ((stats, 8), (selection, 1), (identical_answers, 1), (content, 1)):
        results = doctest.testmod(module)
        assert results.attempted >= least
        assert results.failed == 0


def test_mean_interval_by_hand() -> None:
    # s = 2, n = 4, t(0.975, 3) = 3.1824463: half-width 3.1824463 * 2 / 2.
    interval = stats.mean_interval([8.0, 12.0, 10.0 + math.sqrt(2), 10.0 - math.sqrt(2)])
    assert interval.estimate == pytest.approx(10.0)
    assert interval.high - interval.estimate == pytest.approx(3.1824463)
    assert interval.estimate - interval.low == pytest.approx(3.1824463)
    assert interval.n == 4


@pytest.mark.parametrize("n", [1, 2])
def test_no_interval_below_three_runs(n: int) -> None:
    values = [100.0, 110.0][:n]
    for interval in (
        stats.mean_interval(values),
        stats.paired_ratio(values, values),
        stats.welch_ratio(values, values),
    ):
        assert interval.n == n
        assert math.isfinite(interval.estimate)
        assert math.isnan(interval.low) and math.isnan(interval.high) and math.isnan(interval.p_value)


def test_failed_runs_are_left_out_of_a_mean() -> None:
    assert stats.mean_interval([1.0, float("nan"), 3.0, 2.0]) == stats.mean_interval([1.0, 3.0, 2.0])
    assert stats.mean_interval([float("nan")]).n == 0


@pytest.mark.parametrize("n", [3, 5])
def test_t_interval_over_runs_covers_as_it_says(n: int) -> None:
    """Run means with 3 % between runs: 2,000 experiments, so the coverage is known within 1.5 points (3 sigma)."""
    generator = np.random.default_rng(20260501)
    hits = 0
    for _ in range(2000):
        interval = stats.mean_interval(generator.normal(100.0, 3.0, n))
        hits += interval.low <= 100.0 <= interval.high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_pairing_removes_drift_that_welch_keeps() -> None:
    """Repeats that drift by 20 %: the paired interval of a true ratio of 1.1 stays narrow, Welch's does not."""
    drift = np.array([100.0, 110.0, 120.0, 90.0, 80.0])
    noise = np.array([1.001, 0.999, 1.002, 1.0, 0.998])
    paired = stats.paired_ratio(1.1 * drift * noise, drift)
    welch = stats.welch_ratio(1.1 * drift * noise, drift)
    assert paired.estimate == pytest.approx(1.1, rel=1e-3)
    assert paired.estimate == pytest.approx(welch.estimate)
    assert 1.095 < paired.low < 1.1 < paired.high < 1.105
    assert welch.low < 1.0 < welch.high


def test_paired_ratio_agrees_with_scipy_on_logs() -> None:
    top, bottom = np.array([12.0, 13.5, 12.4, 13.1]), np.array([6.1, 6.0, 6.4, 6.3])
    ratio = stats.paired_ratio(top, bottom)
    test = reference.ttest_1samp(np.log(top / bottom), 0.0)
    bounds = test.confidence_interval(0.95)
    assert ratio.estimate == pytest.approx(reference.gmean(top / bottom))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(bounds.low), math.exp(bounds.high)))
    assert ratio.p_value == pytest.approx(test.pvalue)


def test_welch_ratio_agrees_with_scipy_on_logs() -> None:
    top, bottom = np.array([12.0, 13.5, 12.4]), np.array([6.1, 6.0, 6.4, 6.3, 5.5])
    ratio = stats.welch_ratio(top, bottom)
    test = reference.ttest_ind(np.log(top), np.log(bottom), equal_var=False)
    bounds = test.confidence_interval(0.95)
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(bounds.low), math.exp(bounds.high)))
    assert ratio.p_value == pytest.approx(test.pvalue)
    assert ratio.n == 3


def test_equal_runs_give_a_ratio_of_no_width() -> None:
    ratio = stats.paired_ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert (ratio.low, ratio.estimate, ratio.high, ratio.p_value) == pytest.approx((2.0, 2.0, 2.0, 0.0))
    assert stats.welch_ratio([1.0] * 3, [1.0] * 3).p_value == 1.0


@pytest.mark.parametrize(
    ("top", "bottom", "message"),
    [
        ([1.0, 2.0], [1.0], "2 numerators and 1 denominators"),
        ([1.0, 0.0], [1.0, 1.0], r"numerator must be positive and finite for a ratio, it is \[1.0, 0.0\]"),
        ([1.0], [float("nan")], "denominator must be positive and finite"),
        ([], [], r"numerator must be a non-empty list of run values, its shape is \(0,\)"),
    ],
)
def test_bad_pairs_are_refused(top: list[float], bottom: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.paired_ratio(top, bottom)


CELL = {
    "method": "DDTREE",
    "budget": 8,
    "topk_cap": 8,
    "block_size": 8,
    "drafter": "d",
    "drafter_revision": "1",
    "host_key": "x",
    "machine_key": "m",
    "concurrency": 32,
    "prompts_sha256": "p",
}
AR_CELL = CELL | {
    "method": "AR",
    "budget": None,
    "topk_cap": None,
    "block_size": None,
    "drafter": None,
    "drafter_revision": None,
    "host_key": "y",
}


def test_cells_that_differ_in_the_method_alone_may_be_compared() -> None:
    assert stats.differing_keys(CELL, AR_CELL) == []
    assert stats.differing_keys(CELL, CELL | {"method": "DFLASH", "budget": None, "topk_cap": None}) == []
    stats.require_like(CELL, AR_CELL)


def test_the_block_size_is_free_against_ar_alone() -> None:
    assert stats.differing_keys(CELL | {"block_size": 16}, AR_CELL) == []
    chain = CELL | {"method": "DFLASH", "budget": None, "topk_cap": None, "block_size": 4}
    assert stats.differing_keys(CELL, chain) == ["block_size"]


def test_unlike_cells_are_refused_with_the_keys_named() -> None:
    with pytest.raises(stats.UnlikeCells) as refusal:
        stats.require_like(CELL, AR_CELL | {"concurrency": 8, "prompts_sha256": "q"})
    assert refusal.value.keys == ("concurrency", "prompts_sha256")
    assert "concurrency is 32 against 8 of the baseline" in str(refusal.value)
    assert "prompts_sha256 is p against q of the baseline" in str(refusal.value)


def test_another_drafter_is_no_baseline_for_a_tree() -> None:
    chain = CELL | {"method": "DFLASH", "budget": None, "topk_cap": None, "drafter": "other"}
    assert stats.differing_keys(CELL, chain) == ["drafter"]


def test_holm_by_hand() -> None:
    # Ascending: 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1; each at least as large as the one before.
    assert stats.holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.6, 0.7]).tolist() == pytest.approx([1.0, 1.0])
    assert stats.holm([]).tolist() == []


def test_holm_counts_a_comparison_that_could_not_be_tested() -> None:
    adjusted = stats.holm([0.01, float("nan")])
    assert adjusted[0] == pytest.approx(0.02)
    assert math.isnan(adjusted[1])


def test_the_best_of_equal_budgets_shows_no_gain_when_left_out() -> None:
    """Seven equal budgets, three repeats: the naive choice shows a gain near 2.3 %, the left-out score none."""
    generator = np.random.default_rng(7)
    naive, honest = [], []
    for _ in range(1000):
        values = 100 * np.exp(generator.normal(0, 0.03, (3, 7)))
        naive.append(values.mean(axis=0).max())
        honest.append(np.mean(selection.leave_one_repeat_out(values).scores))
    assert np.mean(naive) == pytest.approx(102.3, abs=0.3)
    assert np.mean(honest) == pytest.approx(100.0, abs=0.3)


def test_leave_one_repeat_out_with_failed_runs() -> None:
    nan = float("nan")
    picked = selection.leave_one_repeat_out([[10.0, 12.0], [10.0, 12.0], [10.0, nan]])
    assert picked.chosen == (1, 1, 1)
    assert picked.scores[:2] == (12.0, 12.0) and math.isnan(picked.scores[2])
    with pytest.raises(ValueError, match="without repeat 1 no candidate has a value"):
        selection.leave_one_repeat_out([[10.0, 12.0], [nan, nan]])
    with pytest.raises(ValueError, match="at least 2 repeats"):
        selection.leave_one_repeat_out([[10.0, 12.0]])


def test_candidates_are_ranked_on_the_repeats_that_all_of_them_have() -> None:
    """Column 1 ran in the fast repeat alone: a mean over its own repeats would put it first."""
    nan = float("nan")
    picked = selection.leave_one_repeat_out([[20.0, 19.0], [10.0, nan], [10.0, nan], [10.0, nan]])
    assert picked.chosen[1:] == (0, 0, 0)
    # Without a common repeat, the candidate with the fewest values goes.
    assert selection.leave_one_repeat_out([[nan, 30.0], [10.0, nan], [10.0, nan], [10.0, 5.0]]).chosen[3] == 0


def test_least_detectable_effect_has_the_power_it_names() -> None:
    """2,000 simulated experiments at the effect for 80 % power find it in 80 % of them (within 3 sigma)."""
    effect = stats.least_detectable_effect(0.03, 5)
    generator = np.random.default_rng(11)
    found = 0
    for _ in range(2000):
        runs = np.exp(generator.normal(0, 0.03, (2, 5)))
        found += stats.paired_ratio((1 + effect) * runs[0], runs[1]).low > 1.0
    assert found / 2000 == pytest.approx(0.8, abs=0.027)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.03, 1), "repeats is 1"), ((0.0, 5), "run_sd is 0.0"), ((0.03, 5, 0), "comparisons is 0")],
)
def test_a_plan_that_cannot_be_judged_is_refused(arguments: tuple[float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.least_detectable_effect(*arguments)
