"""Figures as pages: nothing cut off, nothing printed over, no cross where it would be read as a value."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
from figure_cases import DRAWN, Frames, captured, frames_of_cases, require_clean_page, texts_of

from ddtree_bench.figures import FIGURES, log_axis, style


@pytest.fixture(scope="module")
def frames() -> dict[str, Frames]:
    return frames_of_cases()


@pytest.mark.parametrize(("name", "case"), DRAWN)
def test_nothing_is_cut_off_and_legends_keep_clear_of_axes(
    frames: dict[str, Frames], name: str, case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = captured(monkeypatch)
    FIGURES[name].draw(frames[case], tmp_path / "f")
    (figure,) = seen
    require_clean_page(figure)


def test_long_names_leave_room_for_the_panels(
    frames: dict[str, Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = captured(monkeypatch)
    FIGURES["speedup"].draw(frames["long_names"], tmp_path / "f")
    (figure,) = seen
    figure.set_dpi(style.RC["savefig.dpi"])
    figure.draw_without_rendering()
    heads = [axes.title.get_window_extent() for axes in figure.axes]
    assert not [pair for pair in combinations(heads, 2) if pair[0].overlaps(pair[1])]
    labels = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text().startswith("DDTree B=128")]
    assert len(labels) == 2 and not labels[0].overlaps(labels[1])


def test_curves_moved_apart_stay_inside_the_axes_and_nearer_to_their_budget() -> None:
    for budgets in ((8,), (4, 8, 16), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128), (15, 16)):
        for curves in (1, 3, 12):
            scale = log_axis.LogAxis(budgets, curves, width=117.0)
            low, high = scale.limits
            points = {b: (place - low) / (high - low) * scale.width for b, place in scale.places.items()}
            aside = scale.dodge * (curves - 1) / 2 + log_axis.BESIDE
            assert min(points.values()) - aside >= 0 and max(points.values()) + aside <= scale.width
            gaps = [b - a for a, b in pairwise(points.values())]
            assert all(scale.dodge * (curves - 1) < gap for gap in gaps)


def test_strokes_are_distinct_beyond_five_curves() -> None:
    for method, n in (("DDTREE", 30), ("DFLASH", 6)):
        found = style.strokes(method, n)
        assert len({(str(stroke.line), stroke.fill) for stroke in found}) == n
    assert [stroke.line for stroke in style.strokes("DFLASH", 3)] == [style.METHODS["DFLASH"].line] * 3


def test_crosses_of_failed_runs_stand_outside_the_data(
    frames: dict[str, Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = captured(monkeypatch)
    for figure in FIGURES.values():
        figure.draw(frames["failing"], tmp_path / "f")
    found = 0
    for drawn in seen:
        drawn.draw_without_rendering()
        # The key of a figure is an axis without a frame.
        for axes in (axes for axes in drawn.axes if axes.axison):
            for line in axes.lines:
                if line.get_color() == style.FAILED:
                    found += 1
                    x, y = line.get_transform().transform(line.get_xydata())[0]
                    assert not axes.bbox.contains(x, y)
    assert found == 3 + 1 + 2
    sweep, concurrency, speedup, acceptance = ([text.get_text() for text in texts_of(drawn)] for drawn in seen)
    assert sweep.count("3/3") == 3 and "× AR: 1/3 failed" in sweep and "all runs failed" in sweep
    assert {"4/15", "AR (× 1/3 failed)", "DDTree B=16 K=8 (× 3/3 failed)"} <= set(concurrency)
    assert {"1/3", "3/3"} <= set(speedup)
    assert "DDTree B=16 K=8 (× 3/3 failed)" in acceptance


def test_partly_and_wholly_failed_are_told_apart() -> None:
    assert style.failed_mark(whole=True)["marker"] != style.failed_mark(whole=False)["marker"]
