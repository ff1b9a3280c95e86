"""One look for all figures: a colour, marker and line style a method, paper sizes, files that repeat byte for byte."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from ddtree_bench.plan import EXTERNAL
from ddtree_bench.stats import MIN_REPEATS

SINGLE_COLUMN = 3.35
DOUBLE_COLUMN = 7.0
"""Widths in inches of a column and of a page's text in the usual two-column templates."""

MAX_POINTS = 10
"""Up to so many runs each is drawn as a point."""

DASHES: tuple[Any, ...] = ("-", (0, (3, 1)), (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (6, 2)))
"""Line styles of several configurations of one method."""

FILLS = ("full", "none", "left", "top", "right", "bottom")
"""Fillings of a marker, where there are more configurations of a method than line styles."""

FOOT_SIZE = 6.0
LEGEND_ROW = 0.131
"""Inches of a row of a legend."""
FAILED = "#B00020"


@dataclass(frozen=True)
class Look:
    """How a method is drawn; the lightness of the colours differs, so that a grey print keeps them apart."""

    label: str
    colour: str
    marker: str
    line: str


METHODS = {
    "AR": Look("AR", "#262626", "s", (0, (4, 2))),  # type: ignore[arg-type]
    "DFLASH": Look("DFlash", "#E8A11A", "^", (0, (5, 1.5, 1, 1.5))),  # type: ignore[arg-type]
    "DDTREE": Look("DDTree", "#1668A8", "o", "-"),
}

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "ddtree-bench",
    "path.simplify": False,
    "savefig.dpi": 300,
}


@contextmanager
def look() -> Iterator[None]:
    """The settings of every figure, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(sns.axes_style("ticks"))
        mpl.rcParams.update(RC)
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure of the given inches, without pyplot's global state."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, data: pd.DataFrame, stem: Path) -> list[Path]:
    """Write `<stem>.pdf`, `.png` (300 dpi), `.svg` and `.csv` (what is drawn); the same input gives the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    undated: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
    }
    paths = []
    for suffix, metadata in undated.items():
        path = stem.with_name(f"{stem.name}.{suffix}")
        figure.savefig(path, format=suffix, metadata=metadata)
        paths.append(path)
    path = stem.with_name(f"{stem.name}.csv")
    data.to_csv(path, index=False, lineterminator="\n")
    return [*paths, path]


def shades(method: str, n: int) -> list[Any]:
    """`n` shades of a method's colour from light to dark; the plain colour for one."""
    colour = METHODS[method].colour
    if n == 1:
        return [colour]
    ramp = sns.blend_palette([sns.light_palette(colour, 10)[4], colour, sns.dark_palette(colour, 10)[4]], n_colors=n)
    return list(ramp)


@dataclass(frozen=True)
class Stroke:
    """How one of several configurations of a method is drawn."""

    colour: Any
    line: Any
    fill: Any
    marker: str

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for `Axes.plot` and `Line2D`."""
        alternative = {} if self.fill in ("full", "none") else {"markerfacecoloralt": "white"}
        return {
            "color": self.colour,
            "linestyle": self.line,
            "marker": self.marker,
            "fillstyle": self.fill,
            "markeredgewidth": 0.8,
            **alternative,
        }


def strokes(method: str, n: int) -> list[Stroke]:
    """`n` strokes of a method from light to dark, told apart by line and filling, and beyond those by shade alone.

    Baselines keep their method's line, which the reader knows, and differ in the filling.
    """
    look = METHODS[method]
    lines: tuple[Any, ...] = DASHES if method == "DDTREE" else (look.line,)
    return [
        Stroke(colour, lines[i % len(lines)], FILLS[i // len(lines) % len(FILLS)], look.marker)
        for i, colour in enumerate(shades(method, max(1, n))[:n])
    ]


def text_width(texts: Sequence[str], size: float) -> float:
    """Inches of the longest of the texts' lines at a font size in points."""
    font = FontProperties(family=RC["font.family"], size=size)
    lines = [line for text in texts for line in text.split("\n")]
    return max((TextPath((0, 0), line, prop=font).get_extents().x1 / 72 for line in lines if line.strip()), default=0.0)


def n_of(counts: Sequence[int], unit: str = "run") -> str:
    """`n = 3 runs`, `n = 2–3 runs`, `n = 0 runs`: what n counts is always said."""
    good = sorted({int(count) for count in counts if count > 0}) or [0]
    span = str(good[0]) if len(good) == 1 else f"{good[0]}–{good[-1]}"
    return f"n = {span} {unit}{'' if good == [1] else 's'}"


def starts_of(parts: Sequence[pd.DataFrame]) -> str:
    """What a run is in these rows of the cells table: a fresh server start, but not of an endpoint that runs on."""
    external = {environment == EXTERNAL for part in parts for environment in part["environment"]}
    endpoints = "external endpoints: repeats on one running server count as one"
    return {(True,): endpoints, (False, True): f"fresh server starts; {endpoints}"}.get(
        tuple(sorted(external)), "fresh server starts"
    )


def interval_note(counts: Sequence[int], bars: str, kind: str = "95 % t-interval over runs", unit: str = "run") -> str:
    """What bars and bands show at these numbers of runs, and what is missing below three."""
    good = [count for count in counts if count > 0]
    if not good or max(good) < MIN_REPEATS:
        return f"no interval below {MIN_REPEATS} {unit}s"
    missing = f" (none below {MIN_REPEATS} {unit}s)" if min(good) < MIN_REPEATS else ""
    return f"{bars}: {kind}{missing}"


def points_note(counts: Sequence[int], what: str) -> str:
    """What small marks are, when there are any: only up to `MAX_POINTS` runs are they drawn."""
    good = [count for count in counts if count > 0]
    if not good or min(good) > MAX_POINTS:
        return ""
    return f"; small marks: {what}" + (f" (up to {MAX_POINTS})" if max(good) > MAX_POINTS else "")


def legend_width(labels: Sequence[str]) -> float:
    """Inches of a column of a legend: its longest label, the line before it and the space after it."""
    return 0.46 + text_width(labels, RC["legend.fontsize"])


def legend_columns(labels: Sequence[str], width_in: float) -> int:
    """Columns of a legend whose longest label still fits the width."""
    return max(1, min(len(labels), int(width_in / legend_width(labels))))


def legend_height(labels: Sequence[str], width_in: float) -> float:
    """Inches that a legend takes in as many columns as `legend_columns` gives it."""
    return -(-len(labels) // legend_columns(labels, width_in)) * LEGEND_ROW if labels else 0.0


LEGEND: dict[str, Any] = {
    "handlelength": 2.6,
    "columnspacing": 1.2,
    "labelspacing": 0.3,
    "borderpad": 0.1,
    "borderaxespad": 0.0,
    "handletextpad": 0.6,
}


def footnote(figure: Figure, lines: Sequence[str], width_in: float) -> float:
    """Write small notes at the bottom, wrapped to the width; returns the height they take in inches."""
    wrapped = wrap_notes(lines, width_in)
    height = note_height(wrapped)
    figure.text(
        0.06 / width_in,
        0.04 / figure.get_figheight(),
        "\n".join(wrapped),
        fontsize=FOOT_SIZE,
        va="bottom",
        color="#333333",
    )
    return height


def wrap_notes(lines: Sequence[str], width_in: float) -> list[str]:
    """The notes cut into lines that fit the width at the size of notes."""
    columns = int(width_in * 72 / (FOOT_SIZE * 0.56))
    return [piece for line in lines for piece in textwrap.wrap(line, columns, subsequent_indent="   ")]


def note_height(wrapped: Sequence[str]) -> float:
    """Inches that wrapped notes take."""
    return len(wrapped) * FOOT_SIZE * 1.25 / 72 + 0.06


def failed_mark(whole: bool) -> dict[str, Any]:
    """Keywords for the mark of failed runs: filled when all runs failed, thin when some did."""
    return {
        "color": FAILED,
        "marker": "X" if whole else "x",
        "linestyle": "none",
        "markersize": 5.5 if whole else 4.0,
        "markeredgewidth": 0.0 if whole else 1.0,
    }


def say(axes: Axes, text: str) -> None:
    """A message in the middle of a panel that has nothing to draw."""
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=7, color="#555555", wrap=True
    )


def number(value: float) -> str:
    """Three digits, and thousands in full."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"


def failed_handle(label: str, whole: bool) -> Line2D:
    """A legend entry for failed runs."""
    return Line2D([], [], label=label, **failed_mark(whole))
