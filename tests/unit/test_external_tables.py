"""Repeats on one running server in tables, figures and the report: one run, so no interval between runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from store_factory import SMALL, make_results, tree

from ddtree_bench import tables
from ddtree_bench.comparisons import n_starts, over_starts
from ddtree_bench.figures import FIGURES
from ddtree_bench.figures.style import starts_of
from ddtree_bench.plan import EXTERNAL
from ddtree_bench.report.content import answers, summary

THEIRS = replace(tree(8), name="endpoint", target="theirs", environment=EXTERNAL)


@pytest.fixture
def built(tmp_path: Path) -> dict[str, pd.DataFrame]:
    """Three repeats of a server that was started for each, and three on an endpoint that ran on."""
    same = {(THEIRS.name, repeat): {"start_id": "theirs", "ready_s": None} for repeat in (1, 2, 3)}
    made = make_results(tmp_path / "results", replace(SMALL, servers=(THEIRS, tree(8)), repeats=3, records=same))
    return tables.build_tables(made.views, made.store)


def test_an_endpoint_that_ran_on_has_one_run_and_no_interval(built: dict[str, pd.DataFrame]) -> None:
    budget = built["budget"].set_index("target")
    assert budget["n"].to_dict() == {"local": 3, "theirs": 1}
    assert budget["n_repeats"].to_dict() == {"local": 3, "theirs": 3}
    bounds = [
        name for name in budget if name.endswith(("_low", "_high", "_low_tok_s", "_low_s")) and "chosen" not in name
    ]
    assert len(bounds) >= 8
    assert budget.loc["theirs", bounds].isna().all() and budget.loc["local", bounds].notna().all()
    cells = built["cells"][built["cells"]["target"] == "theirs"]
    window = budget.loc["theirs", "window"]
    mean = cells[f"throughput_{window}_tok_s"].mean()
    assert budget.loc["theirs", "throughput_tok_s"] == pytest.approx(mean)
    runs = built["runs"].set_index("target")
    assert runs.loc["theirs", ["start_status", "cells_ok"]].tolist() == ["ok", 3]
    assert pd.isna(runs.loc["theirs", "ready_s"]) and len(runs.loc[["local"]]) == 3


def test_figures_and_report_say_what_the_repeats_are(tmp_path: Path, built: dict[str, pd.DataFrame]) -> None:
    words = "external endpoints: repeats on one running server count as one"
    cells = built["cells"]
    theirs, ours = (cells[cells["target"] == name] for name in ("theirs", "local"))
    assert starts_of([theirs]) == words
    assert starts_of([ours]) == "fresh server starts" == starts_of([])
    assert starts_of([ours, theirs]) == f"fresh server starts; {words}"
    assert summary(built)["Runs"] == f"n = 1–3 runs (fresh server starts; {words}) for each configuration"
    counts = {listing.title.split()[0]: listing.rows[0][1] for listing in answers(built)}
    assert counts == {"local": "3", "theirs": "1\n3 repeats"}
    for name in ("acceptance", "budget_sweep", "concurrency"):
        assert FIGURES[name].draw(built, tmp_path / name)
        drawn = pd.read_csv(tmp_path / f"{name}.csv")
        means = drawn[(drawn["kind"] == "mean") & drawn["panel"].str.startswith("theirs")]
        assert len(means) and (means["n"] == 1).all() and means["low"].isna().all(), name
        assert len(drawn[(drawn["kind"] == "run") & drawn["panel"].str.startswith("theirs")]) >= 3, name


def test_means_are_over_starts() -> None:
    cells = pd.DataFrame({"start_id": ["a", "a", "b", "c", None]})
    found = over_starts(cells, pd.Series([1.0, 3.0, 4.0, 6.0, float("nan")]))
    assert (found.estimate, found.n) == (4.0, 3) and found.low < 4.0 < found.high
    assert n_starts(cells) == 4
