"""Acceptance by depth: the share of rounds in which at least d drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ddtree_bench.comparisons import n_starts, over_starts, succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.facets import failed_of, failures, in_order, looks, marks, panels

TITLE = "Acceptance by depth"
CAPTION = (
    "Share of verify rounds in which at least d drafts were accepted, for each configuration. The sum over all depths "
    "is the number of drafts accepted a round, that is the accept length (whole rounds) less the bonus token. A tree "
    "lifts the curve at small depths, where a chain stops at its first wrong draft; where curves meet, further nodes "
    "buy nothing. Marks are means over runs (server starts), a run that never got so deep counting as 0; bars "
    "are the 95 % t-interval; greedy decoding repeats itself, so there the interval can have no width. AR drafts "
    "nothing and has no curve."
)
PANEL_HEIGHT, LEFT, RIGHT, BETWEEN, TOP, X_LABEL = 1.7, 0.48, 0.08, 0.45, 0.24, 0.40
SIDE = 0.1
PER_ROW = 2
DRAWN = ["panel", "method", "configuration", "depth", "kind", "repeat", "value", "low", "high", "n", "rounds", "reason"]


def draw(tables: dict[str, pd.DataFrame], stem: Path) -> list[Path]:
    """Draw the figure from the tables `cells` and `acceptance`; returns the paths written (PDF, PNG, SVG, CSV)."""
    with style.look():
        groups = list(panels(tables["cells"])) or [("nothing measured", tables["cells"].assign(configuration=None))]
        strokes = looks([panel[panel["method"] != "AR"] for _, panel in groups])
        columns = min(PER_ROW, len(groups))
        rows = -(-len(groups) // columns)
        handles = _handles(groups, strokes)
        labels = [str(handle.get_label()) for handle in handles]
        width = _width(columns, labels)
        notes = style.wrap_notes(_notes(groups), width)
        foot = style.note_height(notes)
        bottom = foot + X_LABEL + style.legend_height(labels, width - SIDE)
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
            drawn += [{"panel": title, **line} for line in _panel(axes, panel, tables["acceptance"], strokes)]
            if column == 0:
                axes.set_ylabel("P(at least d drafts accepted)")
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.03 / width, foot / height),
            ncols=style.legend_columns(labels, width - SIDE),
            **style.LEGEND,
        )
        style.footnote(figure, notes, width)
        return style.save(figure, pd.DataFrame(drawn, columns=DRAWN), stem)


def _width(columns: int, labels: Sequence[str]) -> float:
    """One column of a page for one panel, unless its legend needs two: for long names, or not to be a long list."""
    narrow = style.SINGLE_COLUMN - SIDE
    fits = style.legend_width(labels) <= narrow and style.legend_height(labels, narrow) <= PANEL_HEIGHT
    return style.SINGLE_COLUMN if columns == 1 and fits else style.DOUBLE_COLUMN


def _panel(
    axes: Axes, panel: pd.DataFrame, acceptance: pd.DataFrame, strokes: dict[str, style.Stroke]
) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = []
    for group in in_order(panel[panel["method"] != "AR"]):
        first = group.iloc[0]
        common = {"method": first["method"], "configuration": first["configuration"]}
        lines = _lines(succeeded(group), acceptance, common)
        _curve(axes, lines, strokes[first["configuration"]])
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


def _lines(cells: pd.DataFrame, acceptance: pd.DataFrame, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Marks of one configuration. A run that never got as deep as another has probability 0 there, not none."""
    reporting = cells[cells["accept_length_rounds"].notna()]
    found = acceptance[acceptance["plan_key"].isin(reporting["plan_key"])]
    by_depth = found.pivot(index="depth", columns="plan_key", values="probability").sort_index()
    by_depth = by_depth.reindex(columns=list(reporting["plan_key"])).fillna(0.0)
    lines: list[dict[str, Any]] = []
    for depth, values in by_depth.iterrows():
        interval = over_starts(reporting, values)
        at = {**common, "depth": int(str(depth))}
        lines.append(
            {
                **at,
                "kind": "mean",
                "value": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "n": interval.n,
            }
        )
        lines += [
            {**at, "kind": "run", "repeat": cell["repeat"], "value": value, "rounds": cell["rounds"]}
            for cell, value in zip(reporting.to_dict("records"), values, strict=True)
            if len(values) <= style.MAX_POINTS
        ]
    return lines


def _curve(axes: Axes, lines: list[dict[str, Any]], stroke: style.Stroke) -> None:
    means = [line for line in lines if line["kind"] == "mean"]
    if not means:
        return
    axes.plot([m["depth"] for m in means], [m["value"] for m in means], markersize=3.6, **stroke.options)
    ranged = [m for m in means if m["low"] == m["low"]]
    axes.errorbar(
        [m["depth"] for m in ranged],
        [m["value"] for m in ranged],
        [[m["value"] - m["low"] for m in ranged], [m["high"] - m["value"] for m in ranged]],
        color=stroke.colour,
        linestyle="none",
        linewidth=0.8,
        capsize=1.6,
    )
    runs = [line for line in lines if line["kind"] == "run"]
    axes.plot(
        [r["depth"] for r in runs],
        [r["value"] for r in runs],
        stroke.marker,
        color=stroke.colour,
        markersize=1.6,
        alpha=0.8,
    )


def _handles(groups: Sequence[tuple[str, pd.DataFrame]], strokes: dict[str, style.Stroke]) -> list[Line2D]:
    """A legend entry a configuration, with how many of its runs failed; a cross for one that has no curve."""
    cells = pd.concat([panel for _, panel in groups])
    handles = []
    for name, stroke in strokes.items():
        mine = cells[cells["configuration"] == name]
        failed = failed_of(mine)
        label = f"{name} (× {failed} failed)" if failed else name
        if len(succeeded(mine)):
            handles.append(Line2D([], [], markersize=3.6, label=label, **stroke.options))
        else:
            handles.append(style.failed_handle(label, whole=True))
    return handles


def _notes(groups: Sequence[tuple[str, pd.DataFrame]]) -> list[str]:
    drafting = [panel[panel["method"] != "AR"] for _, panel in groups]
    counts = [n_starts(succeeded(group)) for panel in drafting for group in in_order(panel)]
    interval, points = style.interval_note(counts, "bars"), style.points_note(counts, "single runs")
    lines = [
        f"{style.n_of(counts)} ({style.starts_of(drafting)}). Marks: mean of the runs; {interval}{points}. "
        "B: budget, K: top-k cap, C: concurrency."
    ]
    for title, panel in groups:
        lines += failures(panel[panel["method"] != "AR"], title if len(groups) > 1 else "")
    return lines + marks([(title, panel[panel["method"] != "AR"]) for title, panel in groups])
