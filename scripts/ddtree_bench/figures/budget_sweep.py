"""Budget sweep: throughput, accept length and round time over the budget, with AR and DFLASH as reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddtree_bench.comparisons import n_starts, succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.curve import draw_curve, draw_failed_runs
from ddtree_bench.figures.facets import failed_of, failures, in_order, marks, panels
from ddtree_bench.figures.log_axis import LogAxis
from ddtree_bench.figures.sweep_data import DRAWN, METRICS, Metric, budgets_of, cap_series, marks_of_group

TITLE = "Budget sweep"
CAPTION = (
    "Throughput, accept length and round time of DDTree over its budget (tree nodes a round), one row a target, "
    "workload and concurrency. A larger budget raises accept length and round time; throughput rises only while the "
    "first outweighs the second. Horizontal lines are AR and DFlash, their bands the 95 % t-interval over runs; large "
    "marks are means over runs with the same interval, small ones single runs (server starts). AR commits one "
    "token a step, so its accept length is 1 by definition and its round time that of a step. The accept length is "
    "that of whole rounds, before the cut at the end of an answer; the speed-up figure has the pooled form. All axes "
    "start at zero. Crosses above an axis are no measurements: they stand over budgets with failed runs, with how many "
    "of how many; a filled one where none succeeded."
)


ROW, ROW_TITLE, X_LABEL, EDGE = 1.45, 0.24, 0.36, 0.06
LEFT, RIGHT, GAP = 0.50, 0.16, 0.60
EACH = (style.DOUBLE_COLUMN - LEFT - RIGHT - 2 * GAP) / 3
STRIP, STRIP_CROWDED, FAILED_LINE = 0.24, 0.36, 0.11
"""Inches above the axes for the crosses of failed budgets, and of a line that names failed baselines."""


def draw(tables: dict[str, pd.DataFrame], stem: Path) -> list[Path]:
    """Draw the figure from the tables `cells` and `budget`; returns the paths written (PDF, PNG, SVG, CSV)."""
    with style.look():
        groups = list(panels(tables["cells"]))
        windows = {title: _window(panel, tables["budget"]) for title, panel in groups}
        scales = {title: LogAxis(budgets_of(panel), len(cap_series(panel)), 72 * EACH) for title, panel in groups}
        handles = _handles(groups)
        notes = style.wrap_notes(_notes(groups, windows), style.DOUBLE_COLUMN)
        heads = {title: _head(panel, scales[title]) for title, panel in groups}
        feet = [X_LABEL if title == groups[-1][0] else 0.6 * X_LABEL for title, _ in groups]
        feet = [f + scales[title].tick_room for f, (title, _) in zip(feet, groups, strict=True)]
        height = EDGE + style.legend_height([str(h.get_label()) for h in handles], _legend_width()) + EDGE
        height += sum(heads.values()) + len(groups) * ROW + sum(feet) + style.note_height(notes)
        figure = style.new_figure(style.DOUBLE_COLUMN, height)
        top = _legend(figure, handles, height)
        drawn: list[dict[str, Any]] = []
        for (title, panel), foot in zip(groups, feet, strict=True):
            top += heads[title]
            axes = _row(figure, height, top)
            _titles(figure, title, panel, 1 - (top - heads[title]) / height)
            for axis, metric in zip(axes, METRICS, strict=True):
                drawn += [{"panel": title, **row} for row in _panel(axis, panel, metric, windows[title], scales[title])]
                if title == groups[-1][0]:
                    axis.set_xlabel(f"Budget (nodes, {scales[title].words})")
            top += ROW + foot
        style.footnote(figure, notes, style.DOUBLE_COLUMN)
        return style.save(figure, pd.DataFrame(drawn, columns=DRAWN), stem)


def _legend_width() -> float:
    return style.DOUBLE_COLUMN - 2 * EDGE


def _head(panel: pd.DataFrame, scale: LogAxis) -> float:
    """Inches above the axes of a panel: title, failed baselines, crosses."""
    counts = list(_failed_budgets(panel).values())
    crowded = scale.crowded([count for count, _ in counts], style.FOOT_SIZE)
    strip = (STRIP_CROWDED if crowded else STRIP) if counts else 0.0
    return ROW_TITLE + FAILED_LINE * len(_failed_baselines(panel)) + strip


def _titles(figure: Figure, title: str, panel: pd.DataFrame, top: float) -> None:
    """The title of a row and the failed baselines, which have no place on the budget axis."""
    height = figure.get_figheight()
    absent = [
        f"no {style.METHODS[method].label} baseline"
        for method in ("AR", "DFLASH")
        if method not in set(panel["method"])
    ]
    text = title + (f" ({', '.join(absent)})" if absent else "")
    left = EDGE / style.DOUBLE_COLUMN
    figure.text(left, top - 0.04 / height, text, fontsize=7.5, fontweight="bold", va="top")
    for place, line in enumerate(_failed_baselines(panel)):
        down = (0.17 + FAILED_LINE * place) / height
        figure.text(left, top - down, line, fontsize=style.FOOT_SIZE, color=style.FAILED, va="top")


def _failed_baselines(panel: pd.DataFrame) -> list[str]:
    groups = [group for group in in_order(panel[panel["method"] != "DDTREE"]) if failed_of(group)]
    parts = [f"× {group['configuration'].iloc[0]}: {failed_of(group)} failed" for group in groups]
    return style.wrap_notes([",  ".join(parts)], style.DOUBLE_COLUMN) if parts else []


def _failed_budgets(panel: pd.DataFrame) -> dict[int, tuple[str, bool]]:
    """Of each budget with failed runs: how many of how many, and whether none succeeded."""
    trees = panel[panel["method"] == "DDTREE"]
    return {
        int(budget): (failed_of(group), bool((group["status"] != "ok").all()))
        for budget, group in trees.groupby("budget")
        if failed_of(group)
    }


def _row(figure: Figure, height: float, top: float) -> list[Axes]:
    width = style.DOUBLE_COLUMN
    return [
        figure.add_axes(((LEFT + i * (EACH + GAP)) / width, 1 - (top + ROW) / height, EACH / width, ROW / height))
        for i in range(3)
    ]


def _window(panel: pd.DataFrame, budget: pd.DataFrame) -> str:
    keys = ["target", "engine", "model", "tensor_parallel", "expert_parallel", "workload", "load"]
    return str(budget.merge(panel[keys].drop_duplicates(), on=keys)["window"].iloc[0])


def _panel(axes: Axes, panel: pd.DataFrame, metric: Metric, window: str, scale: LogAxis) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = []
    configurations = in_order(panel)
    for group in configurations:
        drawn += marks_of_group(group, metric, window)
    for name, stroke in _baselines(panel).items():
        _reference(axes, [row for row in drawn if row["configuration"] == name], stroke)
    _curves(axes, panel, drawn, scale)
    for row in drawn:
        row["metric"], row["unit"] = metric.name.removesuffix("_s"), metric.label.rpartition("(")[2].rstrip(")")
    axes.set_ylabel(metric.label)
    _limits(axes, drawn, scale)
    draw_failed_runs(axes, _failed_budgets(panel), scale)
    if not any(row["kind"] == "mean" for row in drawn):
        axes.set_yticks([0])
        style.say(axes, _nothing(panel))
    elif not scale.values:
        style.say(axes, "no DDTree cell")
    return drawn


def _nothing(panel: pd.DataFrame) -> str:
    return "no run succeeded" if succeeded(panel).empty else "not reported\nby the engine"


def _baselines(panel: pd.DataFrame) -> dict[str, style.Stroke]:
    strokes: dict[str, style.Stroke] = {}
    for method in ("AR", "DFLASH"):
        names = [str(group["configuration"].iloc[0]) for group in in_order(panel[panel["method"] == method])]
        strokes |= zip(names, style.strokes(method, len(names)), strict=True)
    return strokes


def _limits(axes: Axes, drawn: Sequence[Mapping[str, Any]], scale: LogAxis) -> None:
    ends = [row[end] for row in drawn for end in ("value", "high") if row.get(end, np.nan) == row.get(end, np.nan)]
    axes.set_ylim(0, 1.12 * max(ends, default=1.0))
    axes.locator_params(axis="y", nbins=5)
    scale.set_ticks(axes)
    axes.spines[["top", "right"]].set_visible(False)


def _reference(axes: Axes, rows: Sequence[Mapping[str, Any]], stroke: style.Stroke) -> None:
    """A baseline over the whole width: its mean with the method's mark at the right edge, its interval as a band."""
    means = [row for row in rows if row["kind"] == "mean"]
    if not means:
        return
    mean, across = means[0], axes.get_yaxis_transform()
    if mean["low"] == mean["low"]:
        axes.axhspan(mean["low"], mean["high"], color=stroke.colour, alpha=0.16, linewidth=0, zorder=1)
    line = {"transform": across, "color": stroke.colour, "linestyle": stroke.line}
    axes.plot([0, 1], [mean["value"]] * 2, linewidth=1.0, zorder=2, **line)
    axes.plot([1], [mean["value"]], transform=across, clip_on=False, zorder=5, **stroke.options)
    runs = [row["value"] for row in rows if row["kind"] == "run"]
    axes.plot([0.03] * len(runs), runs, stroke.marker, transform=across, markersize=1.8, color=stroke.colour, zorder=3)


def _curves(axes: Axes, panel: pd.DataFrame, drawn: list[dict[str, Any]], scale: LogAxis) -> None:
    series = cap_series(panel)
    strokes = style.strokes("DDTREE", len(series))
    for place, ((label, members), stroke) in enumerate(zip(series.items(), strokes, strict=True)):
        rows = [row for row in drawn if row["configuration"] in members]
        for row in rows:
            row["series"] = f"{row['series']}; {label}" if row.get("series") else label
        draw_curve(axes, rows, "budget", scale, stroke, place)


def _handles(groups: Sequence[tuple[str, pd.DataFrame]]) -> list[Line2D]:
    handles: dict[str, Line2D] = {}
    for _, panel in groups:
        for name, stroke in _baselines(panel).items():
            handles.setdefault(name, Line2D([], [], label=name, **stroke.options))
    for _, panel in groups:
        series = cap_series(panel)
        for label, stroke in zip(series, style.strokes("DDTREE", len(series)), strict=True):
            handles.setdefault(label, Line2D([], [], label=_named(label, panel), **stroke.options))
    whole = [whole for _, panel in groups for _, whole in _failed_budgets(panel).values()]
    if False in whole:
        handles["partly"] = style.failed_handle("n/m: n of m runs failed", whole=False)
    if True in whole:
        handles["wholly"] = style.failed_handle("all runs failed", whole=True)
    return list(handles.values())


def _legend(figure: Figure, handles: Sequence[Line2D], height: float) -> float:
    """Draw the legend at the top; returns where it ends, inches from the top."""
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(EDGE / style.DOUBLE_COLUMN, 1 - EDGE / height),
        ncols=style.legend_columns(labels, _legend_width()),
        **style.LEGEND,
    )
    return EDGE + style.legend_height(labels, _legend_width()) + EDGE


def _named(label: str, panel: pd.DataFrame) -> str:
    caps = sorted({int(cap) for cap in panel["topk_cap"].dropna()})
    if label != "DDTree":
        return label
    return f"DDTree (K={caps[0]})" if len(caps) == 1 else f"DDTree (K={caps[0]}–{caps[-1]})"


def _notes(groups: Sequence[tuple[str, pd.DataFrame]], windows: Mapping[str, str]) -> list[str]:
    counts = [n_starts(succeeded(group)) for _, panel in groups for group in in_order(panel)]
    interval = style.interval_note(counts, "bars and bands")
    points, starts = style.points_note(counts, "single runs"), style.starts_of([panel for _, panel in groups])
    lines = [
        f"{style.n_of(counts)} ({starts}). Large marks: mean; {interval}{points}. "
        f"B: budget, K: top-k cap, C: concurrency. Throughput over {_windows(windows)}. Axes start at 0."
    ]
    for title, panel in groups:
        lines += failures(panel, title if len(groups) > 1 else "")
    return lines + marks(groups)


def _windows(used: Mapping[str, str]) -> str:
    spans = {
        "steady": "the steady window (all C requests in flight)",
        "full": "the full window (first request to last token)",
    }
    if len(set(used.values())) == 1:
        return spans[next(iter(used.values()))]
    full = ", ".join(title for title, window in used.items() if window == "full")
    return f"{spans['steady']}, but for {full} over {spans['full']}"
