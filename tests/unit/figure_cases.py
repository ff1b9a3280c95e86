"""Tables that figures are tried on, and figures caught before they become files."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from store_factory import AR, DEMO, DFLASH, Simulation, make_results, tree

from ddtree_bench import tables
from ddtree_bench.figures import FIGURES, style

CRASH = "CUDA out of memory while capturing graphs"
SMALL = Simulation(n_prompts=4, max_tokens=24)
Frames = dict[str, pd.DataFrame]
CASES = {
    "demo": SMALL,
    "one_run": replace(SMALL, repeats=1),
    "two_loads": replace(SMALL, concurrencies=(1, 2), repeats=1),
    "failing": replace(
        SMALL, failing={("ddtree-b16-k8", r): CRASH for r in (1, 2, 3)} | {("ar", 2): "the server hung"}
    ),
    "all_failed": replace(SMALL, repeats=1, failing={(server.name, 1): CRASH for server in DEMO}),
    "no_baseline": replace(SMALL, servers=DEMO[2:], repeats=1),
    "no_tree": replace(SMALL, servers=(AR, DFLASH), repeats=1),
    "only_ar": replace(SMALL, servers=(AR,), repeats=1),
    "caps": replace(SMALL, servers=(AR, tree(8), tree(15), tree(16), tree(15, 15), tree(16, 16)), repeats=1),
    "unpaired": replace(SMALL, blocks={"ddtree-b16-k8": "later"}),
    "marked": replace(
        SMALL,
        cached={"ar": 3},
        spec={"ddtree-b8-k8": {"spec_tree_branching_nodes": 0}, "dflash": {"spec_verify_ct": 1}},
        overcount={"dflash": 1.1},
        failing_requests={("ddtree-b4-k4", 2): (1,)},
        repeat_prompts=True,
    ),
    "crowd": Simulation(
        servers=(
            AR,
            DFLASH,
            replace(DFLASH, name="dflash-4", block_size=4),
            *(tree(budget, cap) for budget in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128) for cap in (4, 8, budget)),
        ),
        n_prompts=1,
        max_tokens=8,
        repeats=1,
        failing={(f"ddtree-b{budget}-k8", 1): CRASH for budget in (16, 24, 128)} | {("dflash", 1): CRASH},
    ),
    "long_names": replace(
        SMALL,
        servers=(
            AR,
            tree(128),
            replace(tree(128), name="other", max_running_requests=64, flags=(("attention_backend", "fa3"),)),
        ),
        repeats=1,
    ),
    "two_targets": replace(
        SMALL,
        servers=(AR, tree(8), *(replace(server, target="b300", tensor_parallel=8) for server in (AR, tree(8)))),
        repeats=1,
    ),
}
ONE_LOAD = ("two_loads", "crowd", "all_failed")
"""Enough cases for the figure over the concurrency, which has cases of its own in test_concurrency_figure.py."""
DRAWN = [(name, case) for name in FIGURES for case in CASES if name != "concurrency" or case in ONE_LOAD]
"""Which figures are drawn in which cases."""


@cache
def frames_of_cases() -> dict[str, Frames]:
    """The tables of every case, built once a process."""
    built = {}
    for name, simulation in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            made = make_results(Path(folder), simulation)
            built[name] = tables.build_tables(made.views, made.store)
    return built


def captured(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn from now on, instead of their files."""
    seen: list[Figure] = []
    monkeypatch.setattr(style, "save", lambda figure, data, stem: seen.append(figure) or [])
    return seen


def texts_of(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def require_clean_page(figure: Figure) -> None:
    """Fail when something is cut off, a legend covers axes or text, or free texts are printed over each other."""
    figure.set_dpi(style.RC["savefig.dpi"])
    figure.draw_without_rendering()
    page = figure.bbox
    # The tight box of axes holds its labels, titles and notes, but not those of ticks outside its limits.
    for part in (*figure.axes, *figure.texts, *figure.legends):
        box = part.get_tightbbox()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, part
    free = [text for text in figure.texts if text.get_text()]
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert not [axes for axes in figure.axes if axes.get_tightbbox().overlaps(box)]
        assert not [text for text in free if text.get_window_extent().overlaps(box)]
    for one, other in combinations(free, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)
