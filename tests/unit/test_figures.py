"""Figures: whole files, the data beside them, the same bytes again, and nothing that vanishes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from figure_cases import CRASH, DRAWN, SMALL, Frames, captured, frames_of_cases, texts_of
from matplotlib.colors import to_rgb
from PIL import Image
from store_factory import AR, Simulation, make_results, tree

from ddtree_bench import tables
from ddtree_bench.figures import FIGURES, budget_sweep, facets, style
from ddtree_bench.metrics import checks


@pytest.fixture(scope="module")
def frames() -> dict[str, Frames]:
    return frames_of_cases()


@pytest.mark.parametrize(("name", "case"), DRAWN)
def test_every_figure_is_drawn_in_every_case(frames: dict[str, Frames], name: str, case: str, tmp_path: Path) -> None:
    paths = FIGURES[name].draw(frames[case], tmp_path / name)
    assert [path.name for path in paths] == [f"{name}.{suffix}" for suffix in ("pdf", "png", "svg", "csv")]
    pdf = paths[0].read_bytes()
    assert pdf.startswith(b"%PDF-") and pdf.rstrip().endswith(b"%%EOF")
    with Image.open(paths[1]) as image:
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
        assert image.width in (round(300 * style.SINGLE_COLUMN), round(300 * style.DOUBLE_COLUMN))
    assert paths[2].read_text().count("<svg") == 1
    drawn = pd.read_csv(paths[3])
    assert {"panel", "configuration", "kind", "value", "low", "high", "n", "reason"} <= set(drawn.columns)


@pytest.mark.parametrize("name", FIGURES)
def test_fonts_are_embedded_as_type_42(frames: dict[str, Frames], name: str, tmp_path: Path) -> None:
    pdf = FIGURES[name].draw(frames["demo"], tmp_path / name)[0].read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Subtype /Type3" not in pdf and b"/CreationDate" not in pdf


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_tables_give_the_same_bytes(frames: dict[str, Frames], name: str, tmp_path: Path) -> None:
    tables.write_tables(frames["failing"], tmp_path / "tables")
    first = FIGURES[name].draw(frames["failing"], tmp_path / "a")
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 9, "savefig.bbox": "tight"}):
        again = FIGURES[name].draw(tables.read_tables(tmp_path / "tables"), tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


@pytest.mark.parametrize("name", FIGURES)
def test_failed_cells_are_drawn_and_named(frames: dict[str, Frames], name: str, tmp_path: Path) -> None:
    drawn = pd.read_csv(FIGURES[name].draw(frames["failing"], tmp_path / name)[3])
    failed = drawn[(drawn["kind"] == "failed") & (drawn["configuration"] == "DDTree B=16 K=8")]
    assert set(failed["repeat"]) == {1, 2, 3} and set(failed["reason"]) == {CRASH}


def test_failures_are_counted_with_their_reason(frames: dict[str, Frames]) -> None:
    ((_, panel),) = facets.panels(frames["failing"]["cells"])
    assert facets.failures(panel) == [
        "× AR: 1 of 3 runs failed: the server hung",
        f"× DDTree B=16 K=8: 3 of 3 runs failed: {CRASH}",
    ]


def test_the_budget_sweep_draws_the_means_and_runs_of_the_tables(frames: dict[str, Frames], tmp_path: Path) -> None:
    drawn = pd.read_csv(FIGURES["budget_sweep"].draw(frames["demo"], tmp_path / "f")[3])
    budget = frames["demo"]["budget"].set_index("server")
    means = drawn[drawn["kind"] == "mean"].set_index(["configuration", "metric"])
    for configuration, server in (("AR", "ar"), ("DFlash block 8", "dflash"), ("DDTree B=8 K=8", "ddtree-b8-k8")):
        row = means.loc[(configuration, "throughput")]
        assert row["value"] == pytest.approx(budget.loc[server, "throughput_tok_s"])
        assert row["low"] == pytest.approx(budget.loc[server, "throughput_low_tok_s"])
        assert means.loc[(configuration, "round_time"), "value"] == pytest.approx(
            1000 * budget.loc[server, "round_time_s"]
        )
    assert means.loc[("AR", "accept_length_rounds"), "value"] == 1.0
    runs = drawn[(drawn["kind"] == "run") & (drawn["metric"] == "throughput")]
    assert len(runs) == len(frames["demo"]["cells"])


def test_the_speedup_figure_draws_the_rows_of_the_table(frames: dict[str, Frames], tmp_path: Path) -> None:
    drawn = pd.read_csv(FIGURES["speedup"].draw(frames["demo"], tmp_path / "f")[3])
    speedup = frames["demo"]["speedup"].query("baseline == 'AR'").set_index("server")
    means = drawn[drawn["kind"] == "mean"].set_index(["configuration", "quantity"])
    tree8 = means.loc["DDTree B=8 K=8"]
    for quantity in ("speedup", "accept_length_factor", "step_time_factor", "residual_factor"):
        assert tree8.loc[quantity, "value"] == pytest.approx(speedup.loc["ddtree-b8-k8", quantity])
    assert tree8.loc["throughput", "value"] == pytest.approx(speedup.loc["ddtree-b8-k8", "throughput_tok_s"])
    pairs = drawn[(drawn["kind"] == "run") & (drawn["quantity"] == "speedup")]
    assert len(pairs) == 4 * 3


def test_one_run_has_no_interval_and_says_n(frames: dict[str, Frames], tmp_path: Path) -> None:
    for name, figure in FIGURES.items():
        drawn = pd.read_csv(figure.draw(frames["one_run"], tmp_path / name)[3])
        means = drawn[drawn["kind"] == "mean"]
        assert (means["n"] == 1).all()
        assert means["low"].isna().all() and means["high"].isna().all()
    assert style.n_of([1, 1]) == "n = 1 run"
    assert style.interval_note([1, 1], "bars") == "no interval below 3 runs"


def test_a_missing_baseline_is_said_and_throughput_still_shown(frames: dict[str, Frames], tmp_path: Path) -> None:
    drawn = pd.read_csv(FIGURES["speedup"].draw(frames["no_baseline"], tmp_path / "f")[3])
    assert set(drawn.loc[drawn["kind"] == "none", "reason"]) == {"no AR cell in this target, workload and load"}
    assert (drawn["quantity"] == "throughput").sum() == 3


def test_unpaired_ratios_are_marked(frames: dict[str, Frames], tmp_path: Path) -> None:
    drawn = pd.read_csv(FIGURES["speedup"].draw(frames["unpaired"], tmp_path / "f")[3])
    ratios = drawn[(drawn["quantity"] == "speedup") & (drawn["kind"] == "mean")].set_index("configuration")["pairing"]
    assert ratios["DDTree B=16 K=8"] == "unpaired" and (ratios.drop("DDTree B=16 K=8") == "paired").all()


def test_targets_and_loads_have_panels_of_their_own(frames: dict[str, Frames]) -> None:
    assert [title for title, _ in facets.panels(frames["two_loads"]["cells"])] == [
        "local · chat · C = 1",
        "local · chat · C = 2",
    ]
    assert [title for title, _ in facets.panels(frames["two_targets"]["cells"])] == [
        "b300 · TP8 · chat · C = 1",
        "local · TP1 · chat · C = 1",
    ]


def test_a_budget_below_the_cap_belongs_to_its_curve(frames: dict[str, Frames]) -> None:
    ((_, panel),) = facets.panels(frames["caps"]["cells"])
    assert budget_sweep.cap_series(panel) == {
        "DDTree K=8": {"DDTree B=8 K=8", "DDTree B=15 K=8", "DDTree B=16 K=8"},
        "DDTree K=B": {"DDTree B=8 K=8", "DDTree B=15 K=15", "DDTree B=16 K=16"},
    }
    ((_, plain),) = facets.panels(frames["demo"]["cells"])
    assert list(budget_sweep.cap_series(plain)) == ["DDTree"]


def test_configurations_of_one_method_are_told_apart(tmp_path: Path) -> None:
    made = make_results(
        tmp_path,
        replace(SMALL, servers=(AR, tree(8), replace(tree(8), name="slow", max_running_requests=1)), repeats=1),
    )
    ((_, panel),) = facets.panels(tables.build_tables(made.views, made.store)["cells"])
    assert set(panel["configuration"]) == {
        "AR",
        "DDTree B=8 K=8 · max_running_requests=8",
        "DDTree B=8 K=8 · max_running_requests=1",
    }


def test_colours_of_methods_differ_in_lightness() -> None:
    grey = sorted(
        0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (to_rgb(look.colour) for look in style.METHODS.values())
    )
    assert min(b - a for a, b in pairwise(grey)) > 0.15
    assert (
        len({look.marker for look in style.METHODS.values()})
        == len({str(look.line) for look in style.METHODS.values()})
        == 3
    )


def test_no_axis_of_a_value_hides_its_zero(
    frames: dict[str, Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = captured(monkeypatch)
    for one in FIGURES.values():
        one.draw(frames["demo"], tmp_path / "f")
    sweep, concurrency, speedup, acceptance = seen
    assert all(axes.get_ylim()[0] == 0 for axes in (*sweep.axes, concurrency.axes[0], *acceptance.axes))
    assert all(axes.get_xlim()[0] == 0 for axes in speedup.axes)


def test_a_panel_of_more_than_ten_runs_has_its_scale_and_no_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = make_results(tmp_path, Simulation(servers=(AR, tree(8)), n_prompts=1, max_tokens=8, repeats=11))
    seen = captured(monkeypatch)
    budget_sweep.draw(tables.build_tables(made.views, made.store), tmp_path / "f")
    (figure,) = seen
    assert "no run succeeded" not in {text.get_text() for text in texts_of(figure)}
    assert all(len(axes.get_yticks()) >= 3 for axes in figure.axes)


def test_a_run_that_never_got_so_deep_counts_as_zero(frames: dict[str, Frames], tmp_path: Path) -> None:
    """h = [1, 1, 1], [1, 2], [1, 2]: depth 2 was reached in a third of the rounds of one run of three."""
    cells = frames["demo"]["cells"].query("server == 'ddtree-b8-k8'").sort_values("repeat")
    shares = {1: (2 / 3, 1 / 3), 2: (2 / 3,), 3: (2 / 3,)}
    acceptance = pd.DataFrame(
        [
            {"plan_key": key, "depth": depth, "probability": share, "rounds": 3}
            for key, repeat in zip(cells["plan_key"], cells["repeat"], strict=True)
            for depth, share in enumerate(shares[repeat], 1)
        ]
    )
    path = FIGURES["acceptance"].draw({"cells": cells, "acceptance": acceptance}, tmp_path / "f")[3]
    means = pd.read_csv(path).query("kind == 'mean'").set_index("depth")
    assert means["value"].to_dict() == pytest.approx({1: 2 / 3, 2: 1 / 9})
    assert means["n"].to_dict() == {1: 3, 2: 3}


def test_a_run_in_which_no_draft_was_accepted_counts_as_zero(frames: dict[str, Frames], tmp_path: Path) -> None:
    cells = frames["demo"]["cells"].query("server == 'ddtree-b8-k8'")
    all_of = frames["demo"]["acceptance"]
    acceptance = all_of[all_of["plan_key"].isin(cells["plan_key"].iloc[1:])]
    path = FIGURES["acceptance"].draw({"cells": cells, "acceptance": acceptance}, tmp_path / "f")[3]
    assert set(pd.read_csv(path).query("kind == 'mean'")["n"]) == {3}


def test_the_factory_ends_histograms_at_the_deepest_round(frames: dict[str, Frames]) -> None:
    """Or the zeros of runs that got less deep would be in the tables already."""
    assert (frames["demo"]["acceptance"]["probability"] > 0).all()


def test_marks_name_what_to_know_and_whom_it_concerns(frames: dict[str, Frames]) -> None:
    assert facets.marks(list(facets.panels(frames["marked"]["cells"]))) == [
        "! 36 prompt tokens from the prefix cache: AR.",
        "! prompts used more than once: all configurations.",
        "! tokens are not 1 + rounds + accepted drafts in 12 requests: DFlash block 8.",
        "! tokens differ from the server's count by more than 1 %: DFlash block 8.",
        "! only 11 of 12 requests succeeded: DDTree B=4 K=4.",
        "! no tree branched: a chain: DDTree B=8 K=8.",
    ]
    assert facets.marks(list(facets.panels(frames["demo"]["cells"]))) == []


def test_a_round_trip_that_is_much_of_ttft_is_marked(frames: dict[str, Frames]) -> None:
    cells = frames["demo"]["cells"].query("server == 'dflash'")
    ttft = cells["ttft_p50_s"]
    mark = "the way to the server is in the latencies: a round trip takes more than 10 % of TTFT"
    assert mark not in facets.marks_of(cells.assign(link_round_trip_p50_s=0.09 * ttft))
    assert mark in facets.marks_of(cells.assign(link_round_trip_p50_s=0.11 * ttft))


@pytest.mark.parametrize("name", FIGURES)
def test_marks_stand_under_every_figure(
    frames: dict[str, Frames], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = captured(monkeypatch)
    FIGURES[name].draw(frames["marked"], tmp_path / "f")
    (figure,) = seen
    note = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    for mark in ("no tree branched: a chain: DDTree B=8 K=8.", "only 11 of 12 requests succeeded: DDTree B=4 K=4."):
        assert mark in note


def test_the_two_accept_lengths_have_their_own_names(
    frames: dict[str, Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = captured(monkeypatch)
    budget_sweep.draw(frames["demo"], tmp_path / "f")
    FIGURES["speedup"].draw(frames["demo"], tmp_path / "f")
    sweep, speedup = (" ".join(" ".join(text.get_text().split()) for text in texts_of(figure)) for figure in seen)
    assert "Accept length, whole rounds (tokens/round)" in sweep and "pooled" not in sweep
    assert "Accept length, pooled (tokens/round)" in speedup and "whole rounds" not in speedup
    assert "whole rounds" in FIGURES["budget_sweep"].caption and "pooled" in FIGURES["speedup"].caption


def test_more_than_ten_runs_are_not_drawn_one_by_one(tmp_path: Path) -> None:
    made = make_results(tmp_path, Simulation(servers=(AR, tree(8)), n_prompts=1, max_tokens=8, repeats=11))
    built = tables.build_tables(made.views, made.store)
    for name, figure in FIGURES.items():
        drawn = pd.read_csv(figure.draw(built, tmp_path / name)[3])
        assert set(drawn["kind"]) == {"mean"}
    assert style.points_note([11], "single runs") == ""
    assert style.points_note([3, 11], "single runs") == "; small marks: single runs (up to 10)"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_nothing_is_drawn(name: str, tmp_path: Path) -> None:
    nothing = tables.build_tables([], tmp_path)
    assert len(FIGURES[name].draw(nothing, tmp_path / name)) == 4


def test_every_check_that_fails_has_one_mark(frames: dict[str, Frames]) -> None:
    names = {*checks.CHECKS, "client_healthy"}
    assert names == {*facets.MARKED_ITSELF, *facets.CHECK_MARKS}
    cells = frames["demo"]["cells"].query("server == 'dflash'")
    before = facets.marks_of(cells)
    failed = ["client_healthy peak", None, *["lengths peak something_new"] * (len(cells) - 2)]
    marks = facets.marks_of(cells.assign(checks_failed=failed))
    named = [facets.CHECK_MARKS[name] for name in ("client_healthy", "peak", "lengths")]
    assert marks == [*before, *named, "check failed: something_new"]
    twice = cells.assign(checks_failed="cached_prompts tree_branches steady_window", cached_prompt_tokens=9)
    assert facets.marks_of(twice) == [
        *before,
        f"{9 * len(cells)} prompt tokens from the prefix cache",
        "check failed: steady_window",
    ]


def test_what_an_endpoint_leaves_open_is_marked(frames: dict[str, Frames]) -> None:
    cells = frames["demo"]["cells"].query("server == 'ar'")
    before = facets.marks_of(cells)
    open_ends = cells.assign(not_confirmed="tp_size ep_size", cache_not_flushed="HTTP 404")
    assert facets.marks_of(open_ends) == [
        *before,
        "launch configuration not confirmed: tp_size, ep_size",
        "prefix cache not emptied",
    ]


def test_cells_that_were_broken_off_are_not_called_failed(frames: dict[str, Frames]) -> None:
    cells = next(facets.panels(frames["demo"]["cells"]))[1].query("server == 'ar'")
    lost = cells.assign(status=["aborted", *["failed"] * (len(cells) - 1)], reason="it was so")
    n = len(cells)
    assert facets.failures(lost) == [
        f"× AR: {n - 1} of {n} runs failed: it was so",
        f"× AR: 1 of {n} runs broken off: it was so",
    ]
