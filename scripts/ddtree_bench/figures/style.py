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
from matplotlib.lines import Line2D

from ddtree_bench.stats import MIN_REPEATS

SINGLE_COLUMN = 3.35
DOUBLE_COLUMN = 7.0
"""Widths in inches of a column and of a page's text in the usual two-column templates."""

MAX_POINTS = 10
"""Up to so many runs each is drawn as a point."""

DASHES: tuple[Any, ...] = ("-", (0, (3, 1)), (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (6, 2)))
"""Line styles of several configurations of one method."""

FOOT_SIZE = 6.0
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


def n_of(counts: Sequence[int], unit: str = "run") -> str:
    """`n = 3 runs`, `n = 2–3 runs`, `n = 0 runs`: what n counts is always said."""
    good = sorted({int(count) for count in counts if count > 0}) or [0]
    span = str(good[0]) if len(good) == 1 else f"{good[0]}–{good[-1]}"
    return f"n = {span} {unit}{'' if good == [1] else 's'}"


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


def legend_columns(labels: Sequence[str], width_in: float) -> int:
    """Columns of a legend whose longest label still fits the width."""
    each = 0.62 + 0.058 * max((len(label) for label in labels), default=1)
    return max(1, min(len(labels), int(width_in / each)))


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


def cross(axes: Axes, x: float, y: float, transform: Any = None) -> None:
    """The mark of failed cells."""
    extra = {} if transform is None else {"transform": transform}
    axes.plot([x], [y], "x", color=FAILED, markersize=5, markeredgewidth=1.4, clip_on=False, zorder=6, **extra)


def say(axes: Axes, text: str) -> None:
    """A message in the middle of a panel that has nothing to draw."""
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=7, color="#555555", wrap=True
    )


def number(value: float) -> str:
    """Three digits, and thousands in full."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"


def failed_handle(label: str) -> Line2D:
    """A legend entry for failed runs."""
    return Line2D([], [], color=FAILED, marker="x", linestyle="none", markersize=5, markeredgewidth=1.4, label=label)
