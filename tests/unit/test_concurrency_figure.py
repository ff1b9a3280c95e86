"""The figure over the concurrency: the numbers of the tables, the crossings in words, and a page that can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from figure_cases import CRASH, Frames, captured, require_clean_page, texts_of
from matplotlib.figure import Figure
from store_factory import AR, DFLASH, Simulation, build, make_results, tree

from ddtree_bench import tables
from ddtree_bench.figures import concurrency
from ddtree_bench.figures.concurrency_data import accept_length, verdict

LOADS = (1, 2, 4, 8)
SWEEP = Simulation(servers=(AR, DFLASH, tree(8), tree(64)), concurrencies=LOADS, n_prompts=8, max_tokens=24)
CASES = {
    "sweep": SWEEP,
    "one_run": replace(SWEEP, repeats=1),
    "noisy": replace(SWEEP, servers=(AR, tree(64)), run_sd=0.25),
    "unpaired": replace(SWEEP, servers=(AR, tree(64)), blocks={"ddtree-b64-k8": "later"}),
    "failing": replace(SWEEP, failing={("ddtree-b64-k8", r): CRASH for r in (1, 2, 3)} | {("dflash", 2): "it hung"}),
    "close": replace(SWEEP, servers=(AR, tree(8)), concurrencies=(1, 15, 16, 17, 32), repeats=1, n_prompts=32),
    "many": replace(
        SWEEP,
        servers=(AR, DFLASH, *(tree(budget) for budget in (1, 4, 8, 15, 16, 64, 128))),
        concurrencies=(1, 2, 3, 4, 32, 128),
        n_prompts=2,
        max_tokens=6,
        repeats=1,
    ),
    "parts": replace(
        SWEEP,
        servers=(AR, tree(64), *(replace(s, target="b300", tensor_parallel=8) for s in (AR, tree(64)))),
        workloads=("chat", "code"),
        repeats=1,
        max_tokens=8,
    ),
    "no_baseline": replace(SWEEP, servers=(DFLASH, tree(64)), repeats=1),
}


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Frames]:
    """A function from a case to its tables, built once."""
    built: dict[str, Frames] = {}

    def of(name: str) -> Frames:
        if name not in built:
            built[name] = build(tmp_path_factory.mktemp(name), CASES[name])
        return built[name]

    return of


def figure_of(tables_: Frames, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Figure:
    seen = captured(monkeypatch)
    concurrency.draw(tables_, folder / "f")
    return seen[0]


def words(figure: Figure) -> list[str]:
    return [" ".join(text.get_text().split()) for text in texts_of(figure)]


def note(figure: Figure) -> str:
    return max((" ".join(text.get_text().split()) for text in figure.texts), key=len)


def crossovers(tables_: Frames) -> pd.DataFrame:
    return tables_["crossovers"].set_index("server")


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_clean_and_the_key_keeps_clear_of_the_panels(
    frames: Callable[[str], Frames], case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = figure_of(frames(case), monkeypatch, tmp_path)
    require_clean_page(figure)
    panels = [axes for axes in figure.axes if axes.get_ylabel()]
    assert len(panels) == 2 * (4 if case == "parts" else 1)
    for axes in panels:
        box = axes.get_tightbbox()
        assert not [text for text in figure.texts if text.get_window_extent().overlaps(box)]
        assert not [other for other in panels if other is not axes and other.get_tightbbox().overlaps(box)]
        labels = [tick.get_window_extent() for tick in axes.get_yticklabels() if tick.get_text()]
        assert not [one for one, other in pairwise(labels) if one.overlaps(other)]


def test_it_draws_the_means_the_ratios_and_the_crossings_of_the_tables(
    frames: Callable[[str], Frames], tmp_path: Path
) -> None:
    case = frames("sweep")
    drawn = pd.read_csv(concurrency.draw(case, tmp_path / "f")[3])
    means = drawn[drawn["kind"] == "mean"].set_index(["quantity", "configuration", "concurrency"]).sort_index()
    budget = case["budget"].set_index(["server", "concurrency"])
    speedup = case["speedup"].query("baseline == 'AR'").set_index(["server", "concurrency"])
    for load in LOADS:
        throughput = means.loc[("throughput", "DDTree B=64 K=8", load)]
        assert throughput["value"] == pytest.approx(budget.loc[("ddtree-b64-k8", load), "throughput_tok_s"])
        assert throughput["low"] == pytest.approx(budget.loc[("ddtree-b64-k8", load), "throughput_low_tok_s"])
        ratio = means.loc[("ratio", "DDTree B=64 K=8", load)]
        assert ratio["value"] == pytest.approx(speedup.loc[("ddtree-b64-k8", load), "speedup"])
        assert ratio["high"] == pytest.approx(speedup.loc[("ddtree-b64-k8", load), "speedup_high"])
    found = drawn[drawn["kind"] == "crossing"].set_index("configuration")
    expected = crossovers(case).loc["ddtree-b64-k8"]
    assert found.loc["DDTree B=64 K=8", "value"] == pytest.approx(expected["crossing_at"])
    assert found.loc["DDTree B=64 K=8", "low"] == pytest.approx(expected["crossing_low"])
    runs = drawn[drawn["kind"] == "run"]
    assert (runs["quantity"] == "throughput").sum() == len(case["cells"])
    assert (runs["quantity"] == "ratio").sum() == len(speedup) * 3


def test_a_crossing_is_marked_on_the_line_at_one_and_above_its_entry_in_the_key(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = frames("sweep")
    figure = figure_of(case, monkeypatch, tmp_path)
    figure.draw_without_rendering()
    diamonds = [
        line.get_transform().transform(line.get_xydata())[0]
        for axes in figure.axes
        for line in axes.lines
        if line.get_marker() == "D"
    ]
    crossing = crossovers(case).query("outcome == 'crosses'")
    assert len(diamonds) == 2 * len(crossing) > 0
    ratios = figure.axes[1]
    at_one = ratios.transData.transform((0, 1))[1]
    in_panel = [x for x, y in diamonds if y == pytest.approx(at_one)]
    assert sorted(in_panel) == pytest.approx(sorted(x for x, y in diamonds if y != pytest.approx(at_one)))
    assert all(verdict(crossing.loc[[name]]) in words(figure) for name in crossing.index)


def test_the_words_for_crossings() -> None:
    common = {"measured_from": 1, "measured_to": 8, "neighbour_low": 2, "neighbour_high": 4, "direction": "falls"}
    crosses = {**common, "outcome": "crosses", "crossing_at": 3.14, "interval": "t"}
    bounded = {**crosses, "crossing_low": 2.5, "crossing_high": 3.9, "low_open": False, "high_open": False}

    def said(*rows: dict[str, object]) -> str:
        return verdict(pd.DataFrame(rows))

    assert said(bounded) == "3.1 [2.5, 3.9]"
    assert said({**bounded, "low_open": True, "high_open": True}) == "3.1 [<1, >8]"
    assert said({**crosses, "interval": "bracket"}) == "3.1 (2 to 4)"
    assert said(bounded, {**bounded, "direction": "rises", "crossing_at": 6.0}) == (
        "3.1 [2.5, 3.9]\n(ahead from 6.0 [2.5, 3.9])"
    )
    assert said({**common, "outcome": "above", "interval": None}) == "not up to 8"
    assert said({**bounded, "outcome": "above", "high_open": True}) == "not up to 8 [2.5, >8]"
    assert said({**common, "outcome": "below", "interval": None}) == "already at 1"
    assert said({**common, "outcome": "one_concurrency"}) == "only C = 1 measured"
    assert said({"outcome": "no_ratio"}) == "no ratio to AR"


def test_accept_lengths_that_differ_between_concurrencies_show() -> None:
    columns = ["accept_length_common_low", "accept_length_common_high"]
    assert accept_length(pd.DataFrame([[2.161, 2.163]], columns=columns)) == "2.16"
    assert accept_length(pd.DataFrame([[2.1, 2.2]], columns=columns)) == "2.10–2.20"


def test_configurations_that_never_cross_say_so(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = crossovers(frames("sweep"))
    never = rows[(rows["outcome"] == "above") & rows["interval"].isna()]
    assert "ddtree-b8-k8" in never.index
    assert words(figure_of(frames("sweep"), monkeypatch, tmp_path)).count("not up to 8") == len(never)


def test_cells_that_are_missing_are_named_and_their_neighbours_joined(tmp_path: Path) -> None:
    made = make_results(tmp_path, replace(SWEEP, servers=(AR, tree(64)), repeats=1))
    kept = [view for view in made.views if not ("ddtree" in str(view) and "-c4-" in view.name)]
    assert len(kept) == len(made.views) - 1
    built = tables.build_tables(kept, made.store)
    with pytest.MonkeyPatch.context() as patch:
        figure = figure_of(built, patch, tmp_path)
    assert "No cell: DDTree B=64 K=8 at C = 4." in note(figure)
    row = crossovers(built).loc["ddtree-b64-k8"]
    assert (row["neighbour_low"], row["neighbour_high"]) == (2, 8) or row["neighbour_high"] <= 2


def test_failed_cells_stand_above_the_panel_and_in_the_notes(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = figure_of(frames("failing"), monkeypatch, tmp_path)
    assert words(figure).count("4/12") == len(LOADS)
    assert "DDTree B=64 K=8 (× 12/12 failed)" in words(figure) and "no ratio to AR" in words(figure)
    assert f"× DDTree B=64 K=8: runs failed at C = 1 (3/3), 2 (3/3), 4 (3/3), 8 (3/3): {CRASH}" in note(figure)
    assert "× DFlash block 8: runs failed at C = 1 (1/3), 2 (1/3), 4 (1/3), 8 (1/3): it hung" in note(figure)


def test_the_notes_say_what_was_done(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paired = note(figure_of(frames("sweep"), monkeypatch, tmp_path))
    assert "n = 3 runs (fresh server starts)." in paired and "[a, b]: where the 95 % t-test over pairs" in paired
    assert "8 prompts a cell at C = 1, 2, 4, 8. * tokens/round, pooled, on the 8 prompts common to all C." in paired
    assert "(a to b)" not in paired
    unpaired = note(figure_of(frames("unpaired"), monkeypatch, tmp_path))
    assert "Unpaired (measured in other blocks; Welch's interval on log run means): DDTree B=64 K=8 at C = " in unpaired
    assert "(a to b), dotted: no interval" in unpaired
    alone = note(figure_of(frames("one_run"), monkeypatch, tmp_path))
    assert "no interval below 3 runs" in alone and "[a, b]" not in alone


def test_the_window_is_said_where_it_changes_along_the_curve(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = dict(frames("one_run"))
    case["budget"] = case["budget"].assign(
        window=["full" if c == 8 else "steady" for c in case["budget"]["concurrency"]]
    )
    said = note(figure_of(case, monkeypatch, tmp_path))
    assert "steady window (all C requests in flight), for C = 8 the full one (first request to last token)" in said
    assert "ratios over the steady one where both sides have it" in said


def test_marks_name_the_concurrencies_they_concern(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = dict(frames("one_run"))
    cells = case["cells"].copy()
    cells.loc[(cells["method"] == "DFLASH") & (cells["concurrency"] >= 4), "server_running_max"] = 3
    cells["cached_prompt_tokens"] = 1
    case["cells"] = cells
    said = note(figure_of(case, monkeypatch, tmp_path))
    assert "! at most 3 of 4 requests ran at once, by the server's samples: DFlash block 8 at C = 4." in said
    assert "! at most 3 of 8 requests ran at once, by the server's samples: DFlash block 8 at C = 8." in said
    assert "! 1 prompt tokens from the prefix cache: all configurations." in said


def test_parts_stand_below_each_other_with_their_own_key(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = words(figure_of(frames("parts"), monkeypatch, tmp_path))
    assert [text for text in said if " · " in text and len(text) < 30] == [
        "b300 · TP8 · chat",
        "b300 · TP8 · code",
        "local · TP1 · chat",
        "local · TP1 · code",
    ]
    assert said.count("AR overtakes at C =") == 4


def test_without_a_baseline_throughput_is_still_shown(
    frames: Callable[[str], Frames], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = figure_of(frames("no_baseline"), monkeypatch, tmp_path)
    assert "no AR baseline" in words(figure) and words(figure).count("no ratio to AR") == 2
    assert sum(len(line.get_xdata()) == len(LOADS) for line in figure.axes[0].lines) >= 2
