"""How often nominal 95 % intervals cover the truth, and how much the best of several equal budgets flatters itself.

    python tests/benchmarks/interval_coverage.py [--trials 4000] [--seed 1]

The numbers that docs/methodology.md calls simulated are this script's with its defaults. Simulated throughputs are
normal about a true value of 1: a deviation a run, and one a request about its run's value.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ddtree_bench.stats import CONFIDENCE, mean_interval

BETWEEN_RUNS, BETWEEN_REQUESTS = 0.03, 0.20
"""Standard deviations, relative to the true value."""
REQUESTS = 200
"""Requests a run."""
RUNS = (3, 5, 10)
BUDGETS, CHOICES = 7, (1, 3, 5)
"""Equal budgets to choose the best of, and the repeats that each has."""
RESAMPLES = 1000
SELECTIONS = 20_000
"""Trials of the choice, which are cheap."""

Floats = NDArray[np.float64]


def pooled_t(requests: Floats) -> tuple[float, float]:
    """Return Student's interval on all requests, shape (runs, requests), as if they were independent."""
    values = requests.ravel()
    half = stats.t.ppf((1 + CONFIDENCE) / 2, values.size - 1) * values.std(ddof=1) / np.sqrt(values.size)
    return float(values.mean() - half), float(values.mean() + half)


def bootstrap(requests: Floats, random: np.random.Generator) -> tuple[float, float]:
    """Return the percentile bootstrap of the mean over runs."""
    means = requests.mean(axis=1)
    resampled = random.choice(means, size=(RESAMPLES, means.size)).mean(axis=1)
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def run_t(requests: Floats) -> tuple[float, float]:
    """Return the interval of the tables: Student's on run means."""
    interval = mean_interval(requests.mean(axis=1))
    return interval.low, interval.high


def coverage(runs: int, trials: int, random: np.random.Generator) -> dict[str, float]:
    """Return the share of `trials` in which each interval over `runs` runs holds the true value."""
    covered = dict.fromkeys(("pooled requests, t", "run means, percentile bootstrap", "run means, t"), 0)
    for _ in range(trials):
        of_run = random.normal(1.0, BETWEEN_RUNS, size=(runs, 1))
        requests = random.normal(of_run, BETWEEN_REQUESTS, size=(runs, REQUESTS))
        for name, (low, high) in zip(
            covered, (pooled_t(requests), bootstrap(requests, random), run_t(requests)), strict=True
        ):
            covered[name] += low <= 1.0 <= high
    return {name: count / trials for name, count in covered.items()}


def flattery(repeats: int, random: np.random.Generator) -> float:
    """Return by how much the best of `BUDGETS` equal budgets looks faster than it is, with `repeats` runs each."""
    means = random.normal(1.0, BETWEEN_RUNS, size=(SELECTIONS, BUDGETS, repeats)).mean(axis=2)
    return float(means.max(axis=1).mean() - 1)


def stopping(looks: Sequence[int], trials: int, random: np.random.Generator) -> tuple[float, float]:
    """Return how often a ratio that is truly 1 is significant: at the last of `looks` alone, and at any of them."""
    logs = random.normal(0.0, np.sqrt(2) * BETWEEN_RUNS, size=(trials, max(looks)))
    significant = np.array([stats.ttest_1samp(logs[:, :n], 0.0, axis=1).pvalue < 1 - CONFIDENCE for n in looks])
    return float(significant[-1].mean()), float(significant.any(axis=0).mean())


def main() -> None:
    """Print every simulated number of docs/methodology.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)

    print(f"coverage of nominal {CONFIDENCE:.0%} intervals, {arguments.trials} trials, {REQUESTS} requests a run")
    found = {runs: coverage(runs, arguments.trials, random) for runs in RUNS}
    print(f"{'runs':34}" + "".join(f"{runs:>8}" for runs in RUNS))
    for name in found[RUNS[0]]:
        print(f"{name:34}" + "".join(f"{found[runs][name]:>8.1%}" for runs in RUNS))

    print(f"\nthe best of {BUDGETS} equal budgets looks faster than it is by, {SELECTIONS} trials")
    print(", ".join(f"{repeats} repeats: {flattery(repeats, random):.1%}" for repeats in CHOICES))

    last, ever = stopping(RUNS, SELECTIONS, random)
    print(f"\na difference where there is none (p < {1 - CONFIDENCE:.2f}), {SELECTIONS} trials")
    print(f"at {RUNS[-1]} repeats alone: {last:.1%}, at any of {RUNS} repeats: {ever:.1%}")


if __name__ == "__main__":
    main()
