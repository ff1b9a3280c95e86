"""What the budget sweep draws, as data: the marks of a panel and its curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ddtree_bench.comparisons import over_starts, succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.facets import name_of

DRAWN = [
    "panel",
    "metric",
    "unit",
    "method",
    "configuration",
    "series",
    "budget",
    "kind",
    "repeat",
    "value",
    "low",
    "high",
    "n",
    "reason",
]


@dataclass(frozen=True)
class Metric:
    """A column of panels: where its values come from and how they are shown."""

    name: str
    label: str
    scale: float = 1.0


METRICS = (
    Metric("throughput", "Throughput (tokens/s)"),
    Metric("accept_length_rounds", "Accept length, whole\nrounds (tokens/round)"),
    Metric("round_time_s", "Round time (ms)", 1000.0),
)


def budgets_of(panel: pd.DataFrame) -> tuple[int, ...]:
    """The budgets of a panel, ascending."""
    return tuple(sorted(int(budget) for budget in panel["budget"].dropna().unique()))


def marks_of_group(group: pd.DataFrame, metric: Metric, window: str) -> list[dict[str, Any]]:
    """The mean of a configuration with its interval, its single runs when they are few, and its failed runs."""
    first = group.iloc[0]
    common = {"method": first["method"], "configuration": first["configuration"], "budget": first["budget"]}
    good = succeeded(group)
    values = _values(good, metric, window)
    interval = over_starts(good, values)
    rows: list[dict[str, Any]] = []
    if interval.n:
        rows.append(
            {
                **common,
                "kind": "mean",
                "value": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "n": interval.n,
            }
        )
    rows += [
        {**common, "kind": "run", "repeat": r, "value": v}
        for r, v in zip(good["repeat"], values, strict=True)
        if v == v and values.notna().sum() <= style.MAX_POINTS
    ]
    failed = group[group["status"] != "ok"]
    rows += [
        {**common, "kind": "failed", "repeat": r, "reason": why}
        for r, why in zip(failed["repeat"], failed["reason"], strict=True)
    ]
    return rows


def _values(runs: pd.DataFrame, metric: Metric, window: str) -> pd.Series:
    if metric.name == "throughput":
        return runs[f"throughput_{window}_tok_s"].astype(float)
    values = runs[metric.name].astype(float) * metric.scale
    return values.where(runs["method"] != "AR", 1.0) if metric.name == "accept_length_rounds" else values


def cap_series(panel: pd.DataFrame) -> dict[str, set[str]]:
    """Curves of a panel: names of configurations by curve.

    The effective cap is min(topk_cap, budget), so a budget below the cap belongs to that cap's curve too. One curve
    unless a budget was measured with several caps.
    """
    trees = panel[panel["method"] == "DDTREE"].drop_duplicates("configuration")
    kinds: dict[str, dict[str, tuple[int, int]]] = {}
    for _, row in trees.iterrows():
        kind = row["configuration"].removeprefix(name_of(row))
        kinds.setdefault(kind, {})[row["configuration"]] = (int(row["budget"]), int(row["topk_cap"]))
    return {f"{label}{kind}": names for kind, pairs in kinds.items() for label, names in _by_cap(pairs).items()}


def _by_cap(pairs: Mapping[str, tuple[int, int]]) -> dict[str, set[str]]:
    if len({budget for budget, _ in pairs.values()}) == len(pairs):
        return {"DDTree": set(pairs)}
    series: dict[str, set[str]] = {}
    for cap in sorted({cap for budget, cap in pairs.values() if cap < budget}):
        series[f"DDTree K={cap}"] = {name for name, (b, k) in pairs.items() if k == cap or (k == b and b <= cap)}
    series["DDTree K=B"] = {name for name, (b, k) in pairs.items() if k == b}
    return {
        label: names for label, names in series.items() if names and not any(names < other for other in series.values())
    }
