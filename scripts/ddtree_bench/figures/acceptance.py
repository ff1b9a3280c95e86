"""Acceptance by depth: the share of rounds in which at least d drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ddtree_bench.comparisons import succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.facets import failures, in_order, marks, panels
from ddtree_bench.stats import mean_interval

TITLE = "Acceptance by depth"
CAPTION = (
    "Share of verify rounds in which at least d drafts were accepted, for each configuration. The sum over all depths "
    "is the number of drafts accepted a round, that is the accept length less the bonus token. A tree lifts the curve "
    "at small depths, where a chain stops at its first wrong draft; where curves meet, further nodes buy nothing. "
    "Marks are means over runs (fresh server starts), bars the 95 % t-interval; greedy decoding repeats itself, so "
    "there the interval can have no width. AR drafts nothing and has no curve."
)
PANEL_HEIGHT, LEFT, RIGHT, BETWEEN, TOP, X_LABEL, ENTRY = 1.7, 0.48, 0.08, 0.45, 0.24, 0.38, 0.135
PER_ROW = 2
DRAWN = ["panel", "method", "configuration", "depth", "kind", "repeat", "value", "low", "high", "n", "rounds", "reason"]


def draw(tables: dict[str, pd.DataFrame], stem: Path) -> list[Path]:
    """Draw the figure from the tables `cells` and `acceptance`; returns the paths written (PDF, PNG, SVG, CSV)."""
    with style.look():
        groups = list(panels(tables["cells"]))
        names = _names(groups)
        columns = min(PER_ROW, len(groups))
        rows = -(-len(groups) // columns)
        width = style.SINGLE_COLUMN if columns == 1 else style.DOUBLE_COLUMN
        handles = _handles(groups, names)
        entries = style.legend_columns([str(handle.get_label()) for handle in handles], width - 0.1)
        notes = style.wrap_notes(_notes(groups), width)
        foot = style.note_height(notes)
        bottom = foot + X_LABEL + -(-len(handles) // entries) * ENTRY
        height = bottom + rows * (PANEL_HEIGHT + TOP) + (rows - 1) * X_LABEL
        figure = style.new_figure(width, height)
        each = (width - LEFT - RIGHT - (columns - 1) * BETWEEN) / columns
        drawn: list[dict[str, Any]] = []
        for position, (title, panel) in enumerate(groups):
            row, column = divmod(position, columns)
            top = TOP + row * (PANEL_HEIGHT + TOP + X_LABEL)
            axes = figure.add_axes(
                (
                    (LEFT + column * (each + BETWEEN)) / width,
                    1 - (top + PANEL_HEIGHT) / height,
                    each / width,
                    PANEL_HEIGHT / height,
                )
            )
            axes.set_title(title, loc="left", fontweight="bold", pad=4)
            drawn += [{"panel": title, **line} for line in _panel(axes, panel, tables["acceptance"], names)]
            if column == 0:
                axes.set_ylabel("P(at least d drafts accepted)")
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.03 / width, foot / height),
            ncols=entries,
            handlelength=2.6,
            columnspacing=1.2,
            labelspacing=0.25,
            borderpad=0.1,
        )
        style.footnote(figure, notes, width)
        return style.save(figure, pd.DataFrame(drawn, columns=DRAWN), stem)


def _names(groups: Sequence[tuple[str, pd.DataFrame]]) -> dict[str, tuple[str, Any, Any]]:
    """Method, colour and dash of each drafting configuration, the same in every panel: darker with a larger budget."""
    looks: dict[str, tuple[str, Any, Any]] = {}
    for method in ("DFLASH", "DDTREE"):
        found: dict[str, tuple[int, int]] = {}
        for _, panel in groups:
            for group in in_order(panel[panel["method"] == method]):
                first = group.iloc[0]
                size = first["budget"] if method == "DDTREE" else first["block_size"]
                found[first["configuration"]] = (int(size), int(first["topk_cap"]) if method == "DDTREE" else 0)
        ordered = sorted(found, key=lambda name: (found[name], name))
        for place, (name, colour) in enumerate(zip(ordered, style.shades(method, max(1, len(ordered))), strict=False)):
            looks[name] = (
                method,
                colour,
                style.METHODS[method].line if method == "DFLASH" else style.DASHES[place % len(style.DASHES)],
            )
    return looks


def _panel(
    axes: Axes, panel: pd.DataFrame, acceptance: pd.DataFrame, looks: dict[str, tuple[str, Any, Any]]
) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = []
    for group in in_order(panel[panel["method"] != "AR"]):
        first = group.iloc[0]
        common = {"method": first["method"], "configuration": first["configuration"]}
        runs = acceptance[acceptance["plan_key"].isin(succeeded(group)["plan_key"])]
        lines = _lines(runs, common)
        _curve(axes, lines, looks[first["configuration"]])
        failed = group[group["status"] != "ok"]
        lines += [
            {**common, "kind": "failed", "repeat": r, "reason": why}
            for r, why in zip(failed["repeat"], failed["reason"], strict=True)
        ]
        drawn += lines
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("Depth d (drafts)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    if not any(line["kind"] == "mean" for line in drawn):
        axes.set_xticks([])
        style.say(axes, "no run that drafts succeeded" if drawn else "no DFlash or DDTree cell")
    else:
        axes.set_xlim(0.6, max(line["depth"] for line in drawn if line["kind"] == "mean") + 0.4)
    return drawn


def _lines(runs: pd.DataFrame, common: dict[str, Any]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for depth, at in runs.groupby("depth"):
        interval = mean_interval(at["probability"])
        lines.append(
            {
                **common,
                "depth": int(depth),
                "kind": "mean",
                "value": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "n": interval.n,
            }
        )
        lines += [
            {
                **common,
                "depth": int(depth),
                "kind": "run",
                "repeat": row["repeat"],
                "value": row["probability"],
                "rounds": row["rounds"],
            }
            for _, row in at.iterrows()
            if interval.n <= style.MAX_POINTS
        ]
    return lines


def _curve(axes: Axes, lines: list[dict[str, Any]], look: tuple[str, Any, Any]) -> None:
    method, colour, dash = look
    marker = style.METHODS[method].marker
    means = [line for line in lines if line["kind"] == "mean"]
    if not means:
        return
    axes.plot(
        [m["depth"] for m in means],
        [m["value"] for m in means],
        color=colour,
        linestyle=dash,
        marker=marker,
        markersize=3.6,
    )
    ranged = [m for m in means if m["low"] == m["low"]]
    axes.errorbar(
        [m["depth"] for m in ranged],
        [m["value"] for m in ranged],
        [[m["value"] - m["low"] for m in ranged], [m["high"] - m["value"] for m in ranged]],
        color=colour,
        linestyle="none",
        linewidth=0.8,
        capsize=1.6,
    )
    runs = [line for line in lines if line["kind"] == "run"]
    axes.plot([r["depth"] for r in runs], [r["value"] for r in runs], marker, color=colour, markersize=1.6, alpha=0.8)


def _handles(groups: Sequence[tuple[str, pd.DataFrame]], looks: dict[str, tuple[str, Any, Any]]) -> list[Line2D]:
    good = {name for _, panel in groups for name in succeeded(panel)["configuration"]}
    handles = []
    for name, (method, colour, dash) in looks.items():
        marker = style.METHODS[method].marker
        line = Line2D([], [], color=colour, linestyle=dash, marker=marker, markersize=3.6, label=name)
        handles.append(line if name in good else style.failed_handle(name))
    return handles


def _notes(groups: Sequence[tuple[str, pd.DataFrame]]) -> list[str]:
    counts = [len(succeeded(group)) for _, panel in groups for group in in_order(panel[panel["method"] != "AR"])]
    interval, points = style.interval_note(counts, "bars"), style.points_note(counts, "single runs")
    lines = [
        f"{style.n_of(counts)} (fresh server starts). Marks: mean of the runs; {interval}{points}. "
        "B: budget, K: top-k cap, C: concurrency."
    ]
    for title, panel in groups:
        lines += failures(panel[panel["method"] != "AR"], title if len(groups) > 1 else "")
    return lines + marks(pd.concat([panel for _, panel in groups]))
