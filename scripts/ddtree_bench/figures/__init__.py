"""Figures for papers, each drawn from the tables alone; `FIGURES` names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ddtree_bench.figures import acceptance, budget_sweep, concurrency, speedup


@dataclass(frozen=True)
class Figure:
    """A figure: `draw(tables, stem)` writes PDF, PNG, SVG and the CSV drawn; `caption` says how to read it."""

    title: str
    caption: str
    draw: Callable[[dict[str, pd.DataFrame], Path], list[Path]]


FIGURES = {
    module.__name__.rpartition(".")[2]: Figure(module.TITLE, module.CAPTION, module.draw)
    for module in (budget_sweep, concurrency, speedup, acceptance)
}
