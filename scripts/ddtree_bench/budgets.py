"""Sweeps of budgets: the rows of the budget table, and the best budget, chosen without the repeat it is scored on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddtree_bench import stats
from ddtree_bench.comparisons import (
    CONFIGURATION,
    GROUP,
    NOT_JOINED,
    complete,
    configuration_of,
    configurations,
    find_baseline,
    join_keys,
    n_starts,
    over_starts,
    succeeded,
    window_of,
)
from ddtree_bench.selection import leave_one_repeat_out

SWEPT = ("budget", "topk_cap")
SWEEP = tuple(name for name in CONFIGURATION if name not in (*SWEPT, *NOT_JOINED))
"""What the configurations of one sweep share."""


def budget_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """One row for each configuration: means over its runs, and how often it was chosen as the best of its sweep."""
    rows = []
    for _, group in cells.groupby(list(GROUP), dropna=False, sort=False):
        members = configurations(group)
        window = window_of(succeeded(group))
        choices = best_of_sweeps(members, window)
        rows += [_budget_row(member, window) | choice for member, choice in zip(members, choices, strict=True)]
    return rows


def _budget_row(member: pd.DataFrame, window: str) -> dict[str, Any]:
    good = succeeded(member)
    row = {
        **configuration_of(member),
        "n": n_starts(good),
        "n_repeats": len(good),
        "n_failed": len(member) - len(good),
        "requests": int(good["requests"].sum()),
        "requests_ok": int(good["requests_ok"].sum()),
        "window": window,
    }
    measures = (
        (f"throughput_{window}_tok_s", "throughput{}_tok_s"),
        ("accept_length", "accept_length{}"),
        ("accept_length_rounds", "accept_length_rounds{}"),
        ("accept_length_macro", "accept_length_macro{}"),
        ("round_time_s", "round_time{}_s"),
    )
    for source, target in measures:
        interval = over_starts(good, good[source])
        row |= {
            target.format(""): interval.estimate,
            target.format("_low"): interval.low,
            target.format("_high"): interval.high,
        }
    return row


def best_of_sweeps(members: Sequence[pd.DataFrame], window: str) -> list[dict[str, Any]]:
    """The `chosen_*` columns of each member: of the best budget of its sweep, where it was chosen.

    A repeat in which the chosen one failed, or did not answer all requests, is counted and gets no score. The ratio is
    that of paired runs: AR's run of the same repeat and block, if it did the same work.
    """
    sweeps: dict[tuple[Any, ...], list[int]] = {}
    for i, member in enumerate(members):
        if member["method"].iloc[0] == "DDTREE":
            keys = join_keys(member)
            sweeps.setdefault(tuple(keys[name] for name in SWEEP), []).append(i)
    found: list[dict[str, Any]] = [{} for _ in members]
    for sweep in sweeps.values():
        chosen = _best_of([members[i] for i in sweep], members, f"throughput_{window}_tok_s")
        for i, columns in zip(sweep, chosen, strict=True):
            found[i] = columns
    return found


def _best_of(sweep: Sequence[pd.DataFrame], members: Sequence[pd.DataFrame], speed: str) -> list[dict[str, Any]]:
    runs = [complete(member).set_index("repeat") for member in sweep]
    repeats = sorted({int(repeat) for member in sweep for repeat in member["repeat"]})
    table = pd.DataFrame({i: run[speed].astype(float).reindex(repeats) for i, run in enumerate(runs)}, index=repeats)
    if len(sweep) < 2 or table.notna().any(axis=1).sum() < 2:
        return [{} for _ in sweep]
    picked = leave_one_repeat_out(table.to_numpy())
    scores = np.array(picked.scores)
    good = scores[np.isfinite(scores)]
    whole = {"chosen_throughput_tok_s": float(np.exp(np.log(good).mean()))} if good.size else {}
    scored = [runs[i].loc[r] for r, i, x in zip(repeats, picked.chosen, scores, strict=True) if np.isfinite(x)]
    whole |= _over_ar(scored, _ar_of(sweep[0], members), speed)
    failed = [i for i, score in zip(picked.chosen, scores, strict=True) if not np.isfinite(score)]
    return [
        {"chosen_repeats": n, "chosen_failed": failed.count(i)} | whole
        if (n := picked.chosen.count(i))
        else {"chosen_repeats": 0}
        for i in range(len(sweep))
    ]


def _ar_of(member: pd.DataFrame, members: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    candidates = [other for other in members if other["method"].iloc[0] == "AR"]
    try:
        return find_baseline(member, candidates) if candidates else None
    except stats.UnlikeCells:
        # The speed-up table says for each configuration why there is no ratio.
        return None


def _over_ar(scored: Sequence[pd.Series], ar: pd.DataFrame | None, speed: str) -> dict[str, Any]:
    if ar is None:
        return {}
    same = ("repeat", "block", "answered_sha256")
    partners: Mapping[Any, float] = {
        tuple(row[name] for name in same): float(row[speed]) for row in succeeded(ar).to_dict("records")
    }
    pairs = [
        (float(run[speed]), partners[key])
        for run in scored
        if (key := (run.name, run["block"], run["answered_sha256"])) in partners
    ]
    if not pairs:
        return {}
    ratio = stats.paired_ratio([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    return {
        "chosen_n": ratio.n,
        "chosen_over_ar": ratio.estimate,
        "chosen_over_ar_low": ratio.low,
        "chosen_over_ar_high": ratio.high,
    }
