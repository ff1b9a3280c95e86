"""Throughput over the concurrency, its ratio to AR, and the concurrency at which AR overtakes each configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree_bench.figures import concurrency_key as key
from ddtree_bench.figures import style
from ddtree_bench.figures.concurrency_data import DRAWN, Line, Part, lines, parts
from ddtree_bench.figures.concurrency_notes import notes_of
from ddtree_bench.figures.curve import draw_curve, draw_failed_runs
from ddtree_bench.figures.facets import failed_of, looks
from ddtree_bench.figures.log_axis import LogAxis

TITLE = "Concurrency: where AR overtakes"
CAPTION = (
    "Output throughput over the requests in flight, and its ratio to AR at the same concurrency. While the time of a "
    "step is that of reading the weights, verifying drafts costs little; the more requests share a step, the more "
    "the rejected drafts of each take from all others. Diamonds mark the concurrency at which AR overtakes a "
    "configuration: where the ratio is 1, on the line between two measured concurrencies (both on log scales). The "
    "key below the panels says it in figures, with the concurrencies at which the paired t-test over runs (fresh "
    "server starts) does not reject a ratio of 1 in square brackets; with too few runs for that, with the measured "
    "neighbours in round ones. It says too when AR does not overtake within what was measured, or is ahead from the "
    "least concurrency on. Large marks are means over runs with the 95 % t-interval, small ones single runs and "
    "pairs; the axis of the throughput starts at zero. The accept length stands on the prompts that all "
    "concurrencies have in common: one value says that decoding was the same at each. Red crosses above the axis, "
    "with n/m, say that n of m runs failed there."
)

WIDTH = style.DOUBLE_COLUMN
EDGE, LEFT, GAP = 0.06, 0.50, 0.50
HEAD, STRIP, STRIP_CROWDED, PANEL, X_LABEL = 0.23, 0.22, 0.34, 1.55, 0.34
"""Inches of a part's title, of the crosses of failed runs, of the panels and of what is below these."""
APART, SPREAD = 1.6, 6.4
"""Most points between neighbouring curves at one concurrency, and between the outermost: places must be read off."""
RATIO_TICKS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0)


def draw(tables: dict[str, pd.DataFrame], stem: Path) -> list[Path]:
    """Draw the figure from the tables `cells`, `budget`, `speedup` and `crossovers`; returns the paths written."""
    with style.look():
        found = parts(tables)
        strokes = looks([part.cells for part in found])
        each = _panel_width(found)
        keys = [key.entries(part, LEFT + each - EDGE - key.HANDLE - key.ACCEPT) for part in found]
        axes = [_axis(part, each) for part in found]
        notes = style.wrap_notes(notes_of(found), WIDTH)
        above = [_above(part, axis) + PANEL + X_LABEL + axis.tick_room for part, axis in zip(found, axes, strict=True)]
        heights = [tall + key.height(of) for tall, of in zip(above, keys, strict=True)]
        figure = style.new_figure(WIDTH, sum(heights) + style.note_height(notes))
        drawn: list[Line] = []
        top = 0.0
        for part, axis, of, tall in zip(found, axes, keys, heights, strict=True):
            shown = lines(part, tables["cells"])
            _part(figure, part, shown, strokes, axis, top, each)
            crossings = [line for line in shown if line["quantity"] == "crossing"]
            place = key.Place(top + tall - key.height(of), EDGE, LEFT + each, (LEFT + each + GAP, each))
            key.draw_key(figure, of, strokes, crossings, axis, place)
            drawn += [{"panel": part.title, **line} for line in shown]
            top += tall
        style.footnote(figure, notes, WIDTH)
        return style.save(figure, pd.DataFrame(drawn, columns=DRAWN), stem)


def _axis(part: Part, width: float) -> LogAxis:
    curves = len(part.order)
    return LogAxis(part.concurrencies, curves, 72 * width, min(APART, SPREAD / max(1, curves - 1)))


def _panel_width(found: Sequence[Part]) -> float:
    """Inches of each of the two panels, which leave room for the longest words at the right."""
    verdicts = [entry.verdict for part in found for entry in key.entries(part, WIDTH)]
    right = key.BESIDE + style.text_width([*verdicts, key.HEADS[1]], key.TEXT) + 1.5 * EDGE
    return (WIDTH - LEFT - GAP - right) / 2


def _above(part: Part, axis: LogAxis) -> float:
    """Inches above the panels: the title, and the crosses of failed runs."""
    counts = [count for count, _ in _failed(part).values()]
    crowded = axis.crowded(counts, style.FOOT_SIZE)
    return HEAD + ((STRIP_CROWDED if crowded else STRIP) if counts else 0.0)


def _failed(part: Part) -> dict[int, tuple[str, bool]]:
    """Of each concurrency with failed runs: how many of how many, and whether none succeeded."""
    return {
        int(concurrency): (failed_of(group), bool((group["status"] != "ok").all()))
        for concurrency, group in part.cells.groupby("concurrency")
        if failed_of(group)
    }


def _part(
    figure: Figure,
    part: Part,
    shown: Sequence[Line],
    strokes: Mapping[str, style.Stroke],
    axis: LogAxis,
    top: float,
    each: float,
) -> None:
    height = figure.get_figheight()
    figure.text(EDGE / WIDTH, 1 - (top + 0.05) / height, part.title, fontsize=7.5, fontweight="bold", va="top")
    bottom = 1 - (top + _above(part, axis) + PANEL) / height
    left, right = (
        figure.add_axes((x / WIDTH, bottom, each / WIDTH, PANEL / height)) for x in (LEFT, LEFT + each + GAP)
    )
    throughputs, ratios, crossings = (
        [line for line in shown if line["quantity"] == quantity] for quantity in ("throughput", "ratio", "crossing")
    )
    for axes, rows in ((left, throughputs), (right, ratios)):
        for place, name in enumerate(part.order):
            mine = [row for row in rows if row["configuration"] == name]
            draw_curve(axes, mine, "concurrency", axis, strokes[name], place)
        _x_axis(axes, axis)
    _throughput_axis(left, throughputs)
    _ratio_axis(right, ratios, part)
    _crossings(right, crossings, strokes, axis)
    draw_failed_runs(left, _failed(part), axis)


def _x_axis(axes: Axes, axis: LogAxis) -> None:
    axis.set_ticks(axes)
    axes.set_xlabel(f"Concurrency C (requests in flight, {axis.words})")
    axes.spines[["top", "right"]].set_visible(False)


def _ends(rows: Sequence[Line]) -> list[float]:
    return [
        row[end] for row in rows for end in ("value", "low", "high") if row.get(end, np.nan) == row.get(end, np.nan)
    ]


def _throughput_axis(axes: Axes, rows: Sequence[Line]) -> None:
    axes.set_ylabel("Throughput (tokens/s)")
    axes.set_ylim(0, 1.08 * max(_ends(rows), default=1.0))
    axes.locator_params(axis="y", nbins=5)
    if not any(row["kind"] == "mean" for row in rows):
        axes.set_yticks([0])
        style.say(axes, "no run succeeded")


def _ratio_axis(axes: Axes, rows: Sequence[Line], part: Part) -> None:
    axes.set_ylabel("Ratio to AR (log scale)")
    if not any(row["kind"] == "mean" for row in rows):
        axes.set_yticks([])
        style.say(axes, "no AR baseline" if "AR" not in set(part.cells["method"]) else "no ratio to AR")
        return
    ar = style.METHODS["AR"]
    axes.axhline(1, color=ar.colour, linestyle=ar.line, linewidth=1.0, zorder=2)
    ends = [*_ends(rows), 0.8, 1.25]
    low, high = min(ends) / 1.06, max(ends) * 1.06
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = [tick for tick in RATIO_TICKS if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _crossings(axes: Axes, crossings: Sequence[Line], strokes: Mapping[str, style.Stroke], axis: LogAxis) -> None:
    """Where a ratio passes 1, with a line down to the key."""
    for line in crossings:
        if line["kind"] == "crossing":
            colour, x = strokes[line["configuration"]].colour, axis.place(line["value"])
            axes.vlines([x], axes.get_ylim()[0], 1, color=colour, **key.DOWN)
            axes.plot([x], [1], color=colour, zorder=6, **key.CROSSING)
