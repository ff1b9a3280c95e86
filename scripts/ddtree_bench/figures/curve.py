"""A curve over a few measured values: means with their intervals, and the single runs beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation, Transform

from ddtree_bench.figures import style
from ddtree_bench.figures.log_axis import BESIDE, LogAxis


def draw_curve(
    axes: Axes, rows: Sequence[Mapping[str, Any]], x: str, axis: LogAxis, stroke: style.Stroke, place: int
) -> None:
    """Draw one of the axis's curves.

    Parameters
    ----------
    rows : sequence of mapping
        Marks with `kind` (`mean` or `run`, others are passed over), `value`, and `low` and `high` of a mean.
    x : str
        The key of a mark's place on the axis.
    place : int
        Which of the curves it is, from 0: they are moved apart.
    """
    means = sorted((row for row in rows if row["kind"] == "mean"), key=lambda row: int(row[x]))
    if not means:
        return
    middle = (axis.curves - 1) / 2
    here = shifted(axes, axis.dodge * (place - middle))
    spots = [axis.places[int(row[x])] for row in means]
    axes.plot(spots, [row["value"] for row in means], transform=here, zorder=4, **stroke.options)
    ranged = [row for row in means if row["low"] == row["low"]]
    spots, lows, highs = (
        [axis.places[int(r[x])] for r in ranged],
        [r["low"] for r in ranged],
        [r["high"] for r in ranged],
    )
    axes.vlines(spots, lows, highs, color=stroke.colour, linewidth=0.9, transform=here, zorder=4)
    for ends in (lows, highs):
        axes.plot(spots, ends, "_", color=stroke.colour, markersize=4.5, transform=here, zorder=4)
    runs = [row for row in rows if row["kind"] == "run"]
    axes.plot(
        [axis.places[int(row[x])] for row in runs],
        [row["value"] for row in runs],
        stroke.marker,
        color=stroke.colour,
        markersize=1.8,
        alpha=0.8,
        transform=shifted(axes, axis.dodge * (place - middle) + (BESIDE if place >= middle else -BESIDE)),
        zorder=3,
    )


def shifted(axes: Axes, points: float) -> Transform:
    """Data coordinates, moved to the right."""
    return axes.transData + ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)


def draw_failed_runs(axes: Axes, failed: Mapping[int, tuple[str, bool]], axis: LogAxis) -> None:
    """Draw failed runs above the axes, where no value is read: a cross and how many of how many."""
    crowded = axis.crowded([count for count, _ in failed.values()], style.FOOT_SIZE)
    for place, (count, whole) in failed.items():
        above = axes.get_xaxis_transform() + ScaledTranslation(0, 5 / 72, axes.figure.dpi_scale_trans)
        axes.plot([axis.places[place]], [1], transform=above, clip_on=False, **style.failed_mark(whole))
        axes.annotate(
            count,
            (axis.places[place], 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 8.5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90 if crowded else 0,
            fontsize=style.FOOT_SIZE,
            color=style.FAILED,
        )
