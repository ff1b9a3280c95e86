"""Open loops in tables, comparisons, figures and the report: beside closed ones, and alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import store_factory
from store_factory import AR, SMALL, Simulation, make_results, tree

from ddtree_bench import comparisons, crossovers, tables
from ddtree_bench.figures import FIGURES
from ddtree_bench.figures.facets import load_of, panels
from ddtree_bench.metrics import Slos
from ddtree_bench.plan import Cell, Load
from ddtree_bench.report.content import answers, summary

CLOSED = store_factory._cells
OPEN = (Load(8, "open", 2.0, "poisson"), Load(8, "open", 4.0, "constant"))


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, closed: bool = True, **slos: Slos) -> dict[str, pd.DataFrame]:
    """The tables of AR and DDTREE at two rates, and closed loops beside them if asked for."""

    def cells(server: store_factory.Server, simulation: Simulation, repeat: int) -> list[Cell]:
        kept = CLOSED(server, simulation, repeat)
        return [*(kept if closed else []), *(replace(kept[0], load=load) for load in OPEN)]

    monkeypatch.setattr(store_factory, "_cells", cells)
    made = make_results(folder, replace(SMALL, servers=(AR, tree(8)), concurrencies=(1, 8)))
    named = [comparisons.Named("DDTREE", "AR", rate=4.0), comparisons.Named("DDTREE", "AR", concurrency=8)]
    return tables.build_tables(made.views, made.store, named, slos)


def test_a_ratio_is_one_at_the_same_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path, monkeypatch)
    speedup = built["speedup"]
    speedup = speedup[speedup["baseline"] == "AR"].set_index("load")
    assert speedup["comparison"].to_dict() == dict.fromkeys(("c1", "c8", "q2-c8", "q4k-c8"), "ok")
    assert (speedup["n"] == 3).all() and (speedup["n_baseline"] == 3).all()
    # A concurrency names closed loops: the most in flight of an open one is no such thing.
    assert speedup["named"].to_dict() == {"c1": False, "c8": True, "q2-c8": False, "q4k-c8": True}
    cells = built["cells"].drop_duplicates("load").set_index("load")
    assert cells.loc["q4k-c8", ["load_kind", "rate", "arrivals"]].tolist() == ["open", 4.0, "constant"]
    assert cells.loc["c8", ["load_kind", "arrivals"]].tolist() == ["closed", None]


def test_only_closed_loops_cross(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path, monkeypatch)
    (row,) = built["crossovers"].to_dict("records")
    assert (row["n_concurrencies"], row["measured_to"]) == (2, 8)
    opened = {name: frame[frame["load_kind"] == "open"] for name, frame in built.items() if "load_kind" in frame}
    assert crossovers.crossover_rows(opened["cells"], opened["speedup"], built["requests"]) == []


@pytest.mark.parametrize("closed", [True, False])
def test_figures_and_report_name_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    built = build(tmp_path, monkeypatch, closed)
    for name, figure in FIGURES.items():
        assert figure.draw(built, tmp_path / name)
    titles = [title for title, _ in panels(built["budget"])]
    assert "local · chat · 2 requests/s (poisson, at most 8 in flight)" in titles
    assert ("local · chat · C = 8" in titles) == closed
    assert [listing.title for listing in answers(built)] == titles
    assert "4 requests/s (constant, at most 8 in flight)" in summary(built)["Work"]
    drawn = pd.read_csv(tmp_path / "concurrency.csv")
    assert set(drawn["concurrency"].dropna()) == ({1, 8} if closed else set())


def test_goodput_counts_by_the_objectives_of_each_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = build(tmp_path / "a", monkeypatch, chat=Slos(ttft_s=30.0))["cells"]
    assert (cells["slo_met"] == cells["requests_ok"]).all() and (cells["goodput_req_s"] > 0).all()
    cells = build(tmp_path / "b", monkeypatch, another=Slos(ttft_s=30.0))["cells"]
    assert cells["slo_met"].isna().all()


def test_the_load_in_a_phrase() -> None:
    assert load_of({"load_kind": "closed", "concurrency": 4}) == "C = 4"
    row = {"load_kind": "open", "concurrency": 9, "rate": 0.5, "arrivals": "constant"}
    assert load_of(row) == "0.5 requests/s (constant, at most 9 in flight)"
