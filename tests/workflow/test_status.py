"""The commands that look: plan, explain, partial, verify, prune, stop_all, and Snakemake's own report and lint."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from clone import Clone


def test_plan_counts_what_is_missing(measured: Clone) -> None:
    measured.block["budget"] = [4, 8]
    output = measured.snakemake("plan")
    assert "4 cells in 4 runs: 1 cells to be measured in 1 starts" in output
    assert "min, from earlier runs" in output


def test_plan_says_what_can_be_detected(fresh: Clone) -> None:
    fresh.config["repeats"] = 5
    output = fresh.snakemake("plan")
    assert "15 cells in 15 runs: 15 cells to be measured in 15 starts" in output
    assert "time: unknown: no earlier run" in output
    assert "least detectable speed-up with 5 repeats" in output
    assert "warning: comparisons" not in output


def test_plan_says_which_named_comparison_is_not_planned(fresh: Clone) -> None:
    fresh.config["comparisons"] = [
        {"method": "DDTREE", "budget": 4, "baseline": "AR"},
        {"method": "DDTREE", "budget": 16, "baseline": "AR"},
    ]
    output = fresh.snakemake("plan")
    assert "warning: comparisons[1]: method DDTREE budget 16 against AR is not in the sweep" in output
    assert "comparisons[0]" not in output


def test_explain_names_what_is_new(measured: Clone) -> None:
    measured.block["budget"] = [4, 8]
    output = measured.snakemake("explain")
    lines = {line.split(":")[0].split("/")[2]: line for line in output.splitlines() if line.startswith("cells/")}
    assert ": cached: attempt 1 of " in lines["toy-ar"]
    assert (
        ": to be measured: new server.budget = 8 (nearest: 4), server.topk_cap = 8 (nearest: 4)"
        in lines["toy-ddtree-b8-k8"]
    )


def test_partial_makes_everything_from_what_is_there(measured: Clone) -> None:
    measured.block["budget"] = [4, 8]
    before = measured.starts()
    output = measured.snakemake("partial")
    assert measured.starts() == before
    partial = measured.root / "results" / "partial"
    assert "toy-ddtree-b8-k8" in output
    assert "toy-ddtree-b8-k8" in (partial / "report.html").read_text()
    assert "toy-ddtree-b4-k4" in (partial / "tables" / "cells.csv").read_text()
    assert (partial / "figures" / "budget_sweep.pdf").exists()


def test_partial_of_nothing_names_everything_as_absent(fresh: Clone) -> None:
    output = fresh.snakemake("partial")
    assert "0 of 3 cells are there" in output
    assert "none measured yet" in (fresh.root / "results" / "partial" / "report.html").read_text()


def test_verify_finds_what_was_edited(measured: Clone) -> None:
    assert "3 attempts" in measured.snakemake("verify")
    log = next(measured.store.glob("*/*/attempts/1/server.log"))
    log.write_text("edited")
    assert f"{log}: has been changed since it was measured" in measured.snakemake("verify", status=1)


def test_prune_keeps_the_store(measured: Clone) -> None:
    measured.block["method"] = ["AR"]
    output = measured.snakemake("prune")
    assert "removed: 4 views, 0 files and folders on hosts; the store is untouched" in output
    assert len(measured.records()) == 3
    assert {view["labels"]["server"] for view in measured.views().values()} == {"toy-ar"}


def test_snakemakes_report_holds_the_figures(measured: Clone) -> None:
    measured.snakemake("--report", "report.zip")
    with ZipFile(measured.root / "report.zip") as report:
        names = [Path(name).name for name in report.namelist()]
    assert {"budget_sweep.svg", "speedup.svg", "acceptance.svg"} <= set(names)


def test_lint_is_clean(measured: Clone) -> None:
    assert "good condition" in measured.snakemake("--lint")
