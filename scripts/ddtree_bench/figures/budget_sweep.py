"""Budget sweep: throughput, accept length and round time over the budget, with AR and DFLASH as reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation, Transform

from ddtree_bench.comparisons import succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.facets import failures, in_order, marks, name_of, panels
from ddtree_bench.stats import mean_interval

TITLE = "Budget sweep"
CAPTION = (
    "Throughput, accept length and round time of DDTree over its budget (tree nodes a round), one row a target, "
    "workload and concurrency. A larger budget raises accept length and round time; throughput rises only while the "
    "first outweighs the second. Horizontal lines are AR and DFlash, their bands the 95 % t-interval over runs; large "
    "marks are means over runs with the same interval, small ones single runs (fresh server starts). AR commits one "
    "token a step, so its accept length is 1 by definition and its round time that of a step. The accept length is "
    "that of whole rounds, before the cut at the end of an answer. All axes start at zero; a cross marks failed runs."
)


@dataclass(frozen=True)
class Metric:
    """A column of panels: where its values come from and how they are shown."""

    name: str
    label: str
    scale: float = 1.0


METRICS = (
    Metric("throughput", "Throughput (tokens/s)"),
    Metric("accept_length_rounds", "Accept length (tokens/round)"),
    Metric("round_time_s", "Round time (ms)", 1000.0),
)
ROW, ROW_TITLE, TOP, X_LABEL = 1.45, 0.24, 0.30, 0.36
DODGE, BESIDE = 5.0, 5.0
"""Points between curves at one budget, and between a mean and its single runs."""
CLOSE = 1.3
"""Neighbouring budgets closer than this ratio would print over each other on a logarithmic axis."""


def draw(tables: dict[str, pd.DataFrame], stem: Path) -> list[Path]:
    """Draw the figure from the tables `cells` and `budget`; returns the paths written (PDF, PNG, SVG, CSV)."""
    cells = tables["cells"]
    windows = tables["budget"]
    with style.look():
        groups = list(panels(cells))
        counts = [len(succeeded(group)) for _, panel in groups for group in in_order(panel)]
        notes = style.wrap_notes(_notes(groups, windows, counts), style.DOUBLE_COLUMN)
        bottom = style.note_height(notes) + X_LABEL
        height = TOP + len(groups) * (ROW + ROW_TITLE) + (len(groups) - 1) * X_LABEL * 0.6 + bottom
        figure = style.new_figure(style.DOUBLE_COLUMN, height)
        drawn: list[dict[str, Any]] = []
        for position, (title, panel) in enumerate(groups):
            top = TOP + ROW_TITLE + position * (ROW + ROW_TITLE + X_LABEL * 0.6)
            axes = _row(figure, height, top)
            window = _window(panel, windows)
            figure.text(
                0.06, 1 - (top - 0.07) / height, title + _absent(panel), fontsize=7.5, fontweight="bold", va="bottom"
            )
            for axis, metric in zip(axes, METRICS, strict=True):
                drawn += [{"panel": title, **row} for row in _panel(axis, panel, metric, window)]
                if position == len(groups) - 1:
                    axis.set_xlabel(_x_label(panel))
        _legend(figure, groups, height)
        style.footnote(figure, notes, style.DOUBLE_COLUMN)
        return style.save(figure, pd.DataFrame(drawn, columns=DRAWN), stem)


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


def _row(figure: Figure, height: float, top: float) -> list[Axes]:
    width, left, gap = style.DOUBLE_COLUMN, 0.50, 0.52
    each = (width - left - 0.16 - 2 * gap) / 3
    return [
        figure.add_axes(((left + i * (each + gap)) / width, 1 - (top + ROW) / height, each / width, ROW / height))
        for i in range(3)
    ]


def _window(panel: pd.DataFrame, budget: pd.DataFrame) -> str:
    keys = ["target", "engine", "model", "tensor_parallel", "expert_parallel", "workload", "load"]
    return str(budget.merge(panel[keys].drop_duplicates(), on=keys)["window"].iloc[0])


def _absent(panel: pd.DataFrame) -> str:
    absent = [
        f"no {style.METHODS[method].label} baseline"
        for method in ("AR", "DFLASH")
        if method not in set(panel["method"])
    ]
    return f" ({', '.join(absent)})" if absent else ""


def _values(runs: pd.DataFrame, metric: Metric, window: str) -> pd.Series:
    if metric.name == "throughput":
        return runs[f"throughput_{window}_tok_s"].astype(float)
    values = runs[metric.name].astype(float) * metric.scale
    return values.where(runs["method"] != "AR", 1.0) if metric.name == "accept_length_rounds" else values


def _positions(budgets: Sequence[int]) -> dict[int, float]:
    if _evenly(budgets):
        return {budget: float(place) for place, budget in enumerate(budgets)}
    return {budget: float(np.log2(budget)) for budget in budgets}


def _evenly(budgets: Sequence[int]) -> bool:
    return any(b / a < CLOSE for a, b in pairwise(budgets))


def _budgets(panel: pd.DataFrame) -> list[int]:
    return sorted(int(budget) for budget in panel["budget"].dropna().unique())


def _x_label(panel: pd.DataFrame) -> str:
    return "Budget (nodes, evenly spaced)" if _evenly(_budgets(panel)) else "Budget (nodes, log scale)"


def _panel(axes: Axes, panel: pd.DataFrame, metric: Metric, window: str) -> list[dict[str, Any]]:
    budgets = _budgets(panel)
    places = _positions(budgets)
    drawn: list[dict[str, Any]] = []
    configurations = in_order(panel)
    for group in configurations:
        drawn += _rows(group, metric, window)
    for method in ("AR", "DFLASH"):
        groups = [group for group in configurations if group["method"].iloc[0] == method]
        for colour, group in zip(style.shades(method, max(1, len(groups))), groups, strict=False):
            _reference(
                axes, [row for row in drawn if row["configuration"] == group["configuration"].iloc[0]], method, colour
            )
    _curves(axes, panel, drawn, places)
    for row in drawn:
        row["metric"], row["unit"] = metric.name.removesuffix("_s"), metric.label.rpartition("(")[2].rstrip(")")
    _crosses(axes, drawn, places)
    axes.set_ylabel(metric.label)
    _limits(axes, drawn, budgets, places)
    if not any(row["kind"] == "run" for row in drawn):
        axes.set_yticks([0])
        style.say(axes, "no run succeeded")
    elif not budgets:
        style.say(axes, "no DDTree cell")
    return drawn


def _crosses(axes: Axes, drawn: Sequence[Mapping[str, Any]], places: Mapping[int, float]) -> None:
    """Failed runs: under their budget, those of baselines at the left edge."""
    failed = {(row["method"], row["configuration"]): row for row in drawn if row["kind"] == "failed"}
    for (method, _), row in failed.items():
        if method == "DDTREE":
            style.cross(axes, places[int(row["budget"])], 0.045, axes.get_xaxis_transform())
    baselines = [name for method, name in failed if method != "DDTREE"]
    for place, name in enumerate(baselines):
        height = 0.045 + 0.10 * (place + 1)
        style.cross(axes, 0.03, height, axes.transAxes)
        axes.text(
            0.06, height, name, transform=axes.transAxes, fontsize=style.FOOT_SIZE, va="center", color=style.FAILED
        )


def _limits(
    axes: Axes, drawn: Sequence[Mapping[str, Any]], budgets: Sequence[int], places: Mapping[int, float]
) -> None:
    ends = [row[end] for row in drawn for end in ("value", "high") if row.get(end, np.nan) == row.get(end, np.nan)]
    axes.set_ylim(0, 1.12 * max(ends, default=1.0))
    axes.locator_params(axis="y", nbins=5)
    spots = [places[budget] for budget in budgets] or [0.0]
    pad = 0.12 * (max(spots) - min(spots)) or 0.5
    axes.set_xlim(min(spots) - pad, max(spots) + pad)
    axes.set_xticks([places[budget] for budget in budgets], [str(budget) for budget in budgets])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def _rows(group: pd.DataFrame, metric: Metric, window: str) -> list[dict[str, Any]]:
    first = group.iloc[0]
    common = {"method": first["method"], "configuration": first["configuration"], "budget": first["budget"]}
    good = succeeded(group)
    values = _values(good, metric, window)
    interval = mean_interval(values)
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
        if v == v and interval.n <= style.MAX_POINTS
    ]
    failed = group[group["status"] != "ok"]
    rows += [
        {**common, "kind": "failed", "repeat": r, "reason": why}
        for r, why in zip(failed["repeat"], failed["reason"], strict=True)
    ]
    return rows


def _reference(axes: Axes, rows: Sequence[Mapping[str, Any]], method: str, colour: Any) -> None:
    """A baseline over the whole width: its mean with the method's mark at the right edge, its interval as a band."""
    means = [row for row in rows if row["kind"] == "mean"]
    if not means:
        return
    look, mean = style.METHODS[method], means[0]
    across = axes.get_yaxis_transform()
    if mean["low"] == mean["low"]:
        axes.axhspan(mean["low"], mean["high"], color=colour, alpha=0.16, linewidth=0, zorder=1)
    axes.plot([0, 1], [mean["value"]] * 2, transform=across, color=colour, linestyle=look.line, linewidth=1.0, zorder=2)
    axes.plot([1], [mean["value"]], look.marker, transform=across, color=colour, clip_on=False, zorder=5)
    runs = [row["value"] for row in rows if row["kind"] == "run"]
    axes.plot([0.03] * len(runs), runs, look.marker, transform=across, markersize=1.8, color=colour, zorder=3)


def _curves(axes: Axes, panel: pd.DataFrame, drawn: list[dict[str, Any]], places: Mapping[int, float]) -> None:
    series = cap_series(panel)
    look = style.METHODS["DDTREE"]
    looks = zip(style.shades("DDTREE", len(series)), _dashes(len(series)), strict=True)
    for place, ((label, members), (colour, dash)) in enumerate(zip(series.items(), looks, strict=True)):
        shift = DODGE * (place - (len(series) - 1) / 2)
        here, beside = (
            _shifted(axes, shift),
            _shifted(axes, shift + BESIDE * (1 if 2 * place >= len(series) - 1 else -1)),
        )
        rows = [row for row in drawn if row["configuration"] in members]
        for row in rows:
            row["series"] = f"{row['series']}; {label}" if row.get("series") else label
        means = sorted((row for row in rows if row["kind"] == "mean"), key=lambda row: int(row["budget"]))
        if not means:
            continue
        x = [places[int(row["budget"])] for row in means]
        y = [row["value"] for row in means]
        axes.plot(x, y, color=colour, linestyle=dash, marker=look.marker, transform=here, zorder=4)
        ranged = [(at, row) for at, row in zip(x, means, strict=True) if row["low"] == row["low"]]
        axes.vlines(
            [at for at, _ in ranged],
            [row["low"] for _, row in ranged],
            [row["high"] for _, row in ranged],
            color=colour,
            linewidth=0.9,
            transform=here,
            zorder=4,
        )
        for end in ("low", "high"):
            axes.plot(
                [at for at, _ in ranged],
                [row[end] for _, row in ranged],
                "_",
                color=colour,
                markersize=4.5,
                transform=here,
                zorder=4,
            )
        for budget in {int(row["budget"]) for row in means}:
            runs = [row["value"] for row in rows if row["kind"] == "run" and int(row["budget"]) == budget]
            axes.plot(
                [places[budget]] * len(runs),
                runs,
                look.marker,
                color=colour,
                markersize=1.8,
                alpha=0.8,
                transform=beside,
                zorder=3,
            )


def _shifted(axes: Axes, points: float) -> Transform:
    return axes.transData + ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)


def _dashes(n: int) -> list[Any]:
    return [style.DASHES[i % len(style.DASHES)] for i in range(n)]


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


def _legend(figure: Figure, groups: Sequence[tuple[str, pd.DataFrame]], height: float) -> None:
    handles: dict[str, Line2D] = {}
    for method in ("AR", "DFLASH"):
        look = style.METHODS[method]
        for _, panel in groups:
            names = [group["configuration"].iloc[0] for group in in_order(panel[panel["method"] == method])]
            for colour, name in zip(style.shades(method, max(1, len(names))), names, strict=False):
                handles[name] = Line2D([], [], color=colour, linestyle=look.line, marker=look.marker, label=name)
    for _, panel in groups:
        series = cap_series(panel)
        for label, colour, dash in zip(series, style.shades("DDTREE", len(series)), _dashes(len(series)), strict=True):
            handles[label] = Line2D([], [], color=colour, linestyle=dash, marker="o", label=_named(label, panel))
    if any((panel["status"] != "ok").any() for _, panel in groups):
        handles["failed"] = style.failed_handle("failed runs")
    figure.legend(
        handles=list(handles.values()),
        loc="upper left",
        bbox_to_anchor=(0.05, 1 - 0.02 / height),
        ncols=style.legend_columns(list(handles), style.DOUBLE_COLUMN - 0.3),
        handlelength=2.6,
        columnspacing=1.4,
    )


def _named(label: str, panel: pd.DataFrame) -> str:
    caps = sorted({int(cap) for cap in panel["topk_cap"].dropna()})
    if label != "DDTree":
        return label
    return f"DDTree (K={caps[0]})" if len(caps) == 1 else f"DDTree (K={caps[0]}–{caps[-1]})"


def _notes(groups: Sequence[tuple[str, pd.DataFrame]], budget: pd.DataFrame, counts: Sequence[int]) -> list[str]:
    interval = style.interval_note(counts, "bars and bands")
    points = style.points_note(counts, "single runs")
    lines = [
        f"{style.n_of(counts)} (fresh server starts). Large marks: mean; {interval}{points}. "
        f"B: budget, K: top-k cap, C: concurrency. Throughput over {_windows(groups, budget)}. Axes start at 0."
    ]
    for title, panel in groups:
        lines += failures(panel, title if len(groups) > 1 else "")
    return lines + marks(pd.concat([panel for _, panel in groups]))


def _windows(groups: Sequence[tuple[str, pd.DataFrame]], budget: pd.DataFrame) -> str:
    spans = {
        "steady": "the steady window (all C requests in flight)",
        "full": "the full window (first request to last token)",
    }
    used = {title: _window(panel, budget) for title, panel in groups}
    if len(set(used.values())) == 1:
        return spans[next(iter(used.values()))]
    full = ", ".join(title for title, window in used.items() if window == "full")
    return f"{spans['steady']}, but for {full} over {spans['full']}"
