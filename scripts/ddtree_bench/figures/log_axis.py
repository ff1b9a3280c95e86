"""Where the few values of a sweep, budgets or concurrencies, stand on an axis that is logarithmic if it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from ddtree_bench.figures import style

CLOSE = 1.3
"""Neighbouring values closer than this ratio would print over each other on a logarithmic axis."""
DODGE, BESIDE, MARK = 5.0, 5.0, 3.0
"""Points between curves at one value (less where values are close), from a mean to its runs, and half of a mark."""
TICK_SIZE = 7.0
"""Font size of the labels of ticks."""


@dataclass(frozen=True)
class LogAxis:
    """An axis of a few measured values: where each stands, and how far curves at one value are moved apart.

    Attributes
    ----------
    values : tuple of int
        Budgets or concurrencies of the panel, ascending.
    curves : int
        Curves of the panel.
    width : float
        Width of the axes in points.
    most : float
        Most points between neighbouring curves at one value.
    """

    values: tuple[int, ...]
    curves: int
    width: float
    most: float = DODGE

    @cached_property
    def evenly(self) -> bool:
        """Whether values stand side by side, since some are too close for a logarithmic axis."""
        return any(b / a < CLOSE for a, b in pairwise(self.values))

    @cached_property
    def places(self) -> dict[int, float]:
        """Coordinate of each value on the axis."""
        return {v: float(i) if self.evenly else float(np.log2(v)) for i, v in enumerate(self.values)}

    @cached_property
    def dodge(self) -> float:
        """Points between neighbouring curves: all of them stay nearer to their value than to the next."""
        between = 0.5 * self._least_gap / max(1.0, self._range) * 0.8 * self.width
        room = between if len(self.values) > 1 else 0.25 * self.width
        return min(self.most, room / max(1, self.curves - 1))

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Ends of the axis: everything that is moved aside stays inside."""
        spots = list(self.places.values()) or [0.0]
        aside = self.dodge * (self.curves - 1) / 2 + BESIDE + MARK
        pad = max(0.12 * self._range, self._range * aside / (self.width - 2 * aside)) or 0.5
        return min(spots) - pad, max(spots) + pad

    def place(self, value: float) -> float:
        """Coordinate of any value between the first and the last one."""
        return float(np.interp(np.log2(value), np.log2(self.values), list(self.places.values())))

    @property
    def turned(self) -> bool:
        """Whether the labels of the ticks have to be turned."""
        return self.crowded([str(value) for value in self.values], TICK_SIZE)

    @property
    def tick_room(self) -> float:
        """Inches that turned labels of ticks take more than level ones."""
        return style.text_width([str(value) for value in self.values], TICK_SIZE) if self.turned else 0.0

    @property
    def words(self) -> str:
        """How values are spaced, for the axis's label."""
        return "evenly spaced" if self.evenly else "log scale"

    @property
    def _range(self) -> float:
        spots = list(self.places.values()) or [0.0]
        return max(spots) - min(spots)

    @property
    def _least_gap(self) -> float:
        return min((b - a for a, b in pairwise(self.places.values())), default=0.0)

    def set_ticks(self, axes: Axes) -> None:
        """Set limits and labelled ticks of an x axis."""
        axes.set_xlim(*self.limits)
        labels = [str(value) for value in self.values]
        axes.set_xticks(list(self.places.values()), labels, rotation=90 if self.turned else 0)
        axes.minorticks_off()

    def crowded(self, labels: Sequence[str], size: float) -> bool:
        """Whether labels of this font size at neighbouring values would touch."""
        low, high = self.limits
        gap = self._least_gap / (high - low) * self.width / 72
        return len(self.values) > 1 and gap < style.text_width(labels, size) + 0.03
