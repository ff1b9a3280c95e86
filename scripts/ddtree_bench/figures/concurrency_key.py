"""The key below the panels over the concurrency: strokes, names, accept lengths, and where AR overtakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddtree_bench.comparisons import succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.concurrency_data import DASH, Line, Part, accept_length, verdict
from ddtree_bench.figures.facets import broken, failed_of
from ddtree_bench.figures.log_axis import LogAxis

HEAD, LINE, BELOW = 0.19, 0.145, 0.08
"""Inches above the lines of a key, of one of them, and below all."""
HANDLE, ACCEPT, BESIDE = 0.42, 0.66, 0.08
"""Inches of a stroke, of the column of accept lengths, and between the intervals and the words beside them."""
TEXT = 7.0
HEADS = ("Accept length*", "AR overtakes at C =")
CROSSING: dict[str, Any] = {
    "marker": "D",
    "markersize": 4.2,
    "markerfacecolor": "white",
    "markeredgewidth": 1.1,
    "linestyle": "none",
}
"""The mark of a crossing, here and in the panel above."""
DOWN: dict[str, Any] = {"linestyle": (0, (1, 2)), "linewidth": 0.8, "zorder": 2}
"""The line from the panel down to the key."""


@dataclass(frozen=True)
class Entry:
    """What the key says of one configuration; `label` and `verdict` may have several lines."""

    configuration: str
    succeeded: bool
    label: str
    accept: str
    verdict: str

    @property
    def lines(self) -> int:
        """Lines of text that it takes."""
        return 1 + max(self.label.count("\n"), self.verdict.count("\n"))


@dataclass(frozen=True)
class Place:
    """Where a key stands, in inches from the left and from the top of the page.

    `left` is where strokes begin, `middle` the right end of the accept lengths, `forest` the left end and the width of
    the axes that intervals are drawn in.
    """

    top: float
    left: float
    middle: float
    forest: tuple[float, float]


def entries(part: Part, room: float) -> list[Entry]:
    """The entries of a part in reading order; names that are wider than `room`, in inches, take several lines."""
    found = []
    for name in part.order:
        mine = part.cells[part.cells["configuration"] == name]
        failed = failed_of(mine)
        good = len(succeeded(mine)) > 0
        label = name + (f" (× {failed} failed)" if failed else "")
        label = label if style.text_width([label], TEXT) <= room else broken(label)
        if (mine["method"] == "AR").all():
            found.append(Entry(name, good, label, "1" if good else DASH, "baseline"))
            continue
        rows = part.crossovers[part.crossovers["configuration"] == name]
        found.append(Entry(name, good, label, accept_length(rows), verdict(rows)))
    return found


def height(of: Sequence[Entry]) -> float:
    """Inches of a key."""
    return HEAD + LINE * sum(entry.lines for entry in of) + BELOW


def draw_key(
    figure: Figure,
    of: Sequence[Entry],
    strokes: Mapping[str, style.Stroke],
    crossings: Sequence[Line],
    axis: LogAxis,
    place: Place,
) -> None:
    """Draw a key; `crossings` are the lines of the quantity `crossing`."""
    width, page = figure.get_figwidth(), figure.get_figheight()
    tall = height(of) - HEAD - BELOW
    bottom = 1 - (place.top + HEAD + tall) / page
    handles = figure.add_axes((place.left / width, bottom, (HANDLE - 0.08) / width, tall / page))
    forest = figure.add_axes((place.forest[0] / width, bottom, place.forest[1] / width, tall / page))
    for axes in (handles, forest):
        axes.set_ylim(-tall, 0)
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    handles.set_axis_off()
    handles.set_xlim(0, 1)
    _forest_axis(forest, axis)
    texts = [(place.middle, HEADS[0], "right"), (place.forest[0] + place.forest[1] + BESIDE, HEADS[1], "left")]
    for x, text, side in texts:
        _write(figure, x, place.top + HEAD / 2, text, side, colour="#555555")
    down = 0.0
    for entry in of:
        middle = down + LINE * entry.lines / 2
        y = place.top + HEAD + middle
        stroke = strokes[entry.configuration]
        if entry.succeeded:
            handles.add_line(Line2D([0, 0.5, 1], [-middle] * 3, markevery=[1], markersize=3.6, **stroke.options))
        else:
            handles.plot([0.5], [-middle], **style.failed_mark(whole=True))
        _write(figure, place.left + HANDLE, y, entry.label, "left")
        _write(figure, place.middle, y, entry.accept, "right")
        _write(figure, texts[1][0], y, entry.verdict, "left")
        for line in (line for line in crossings if line["configuration"] == entry.configuration):
            _interval(forest, line, -middle, stroke, axis)
        down += LINE * entry.lines


def _forest_axis(axes: Axes, axis: LogAxis) -> None:
    axes.set_xlim(*axis.limits)
    axes.set_xticks(list(axis.places.values()), [""] * len(axis.values))
    axes.minorticks_off()
    axes.tick_params(length=0)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")


def _interval(axes: Axes, line: Line, y: float, stroke: style.Stroke, axis: LogAxis) -> None:
    """A crossing below its place in the panel, and its interval: a bracket is dotted, an open end has an arrow."""
    if line["low"] == line["low"] and line["low"] is not None:
        ends = [axis.place(line["low"]), axis.place(line["high"])]
        solid = line["interval"] == "t"
        axes.plot(ends, [y, y], color=stroke.colour, linewidth=1.1, linestyle="-" if solid else (0, (1, 1)))
        for x, opened, arrow in zip(ends, (line["low_open"], line["high_open"]), "<>", strict=True):
            if solid:
                axes.plot([x], [y], arrow if opened else "|", color=stroke.colour, markersize=3.2 if opened else 4.5)
    if line["kind"] == "crossing":
        axes.vlines([axis.place(line["value"])], y, 0, color=stroke.colour, **DOWN)
        axes.plot([axis.place(line["value"])], [y], color=stroke.colour, zorder=5, **CROSSING)


def _write(figure: Figure, x: float, y: float, text: str, side: str, colour: str = "black") -> None:
    """Text at inches from the left and from the top."""
    at = x / figure.get_figwidth(), 1 - y / figure.get_figheight()
    figure.text(*at, text, ha=side, va="center_baseline", fontsize=TEXT, color=colour, linespacing=1.1)
