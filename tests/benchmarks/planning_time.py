"""How long snakemake takes over a large plan: a dry run of N cells, and a run in which nothing is to be done.

    python tests/benchmarks/planning_time.py [--runs 1000]

Every run has one cell, which is the most rules that a number of cells can make. Views and results are stand-ins:
nothing is measured, and Snakemake only looks whether they are there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from clone import Clone

from ddtree_bench.config import read_files
from ddtree_bench.figures import FIGURES
from ddtree_bench.project import open_project
from ddtree_bench.tables import TABLES

REPEATS = 5
TIMES = 5
DRY_RUN_S, NO_OP_S = 4.0, 5.0
"""Bars for 1,000 cells."""


def large_clone(folder: Path, runs: int) -> Clone:
    """A clone whose plan has `runs` runs of one cell: AR, DFLASH and a tree budget for each of the rest."""
    clone = Clone.make(folder)
    clone.config["repeats"] = REPEATS
    clone.block["budget"] = list(range(1, runs // REPEATS - 1))
    clone.block["topk_cap"] = "budget"
    clone.write_config()
    return clone


def pretend_done(clone: Clone) -> None:
    """Write stand-ins for everything the workflow makes, in the order in which it would."""
    project = open_project(read_files([clone.root / "config" / "config.yaml"]), clone.root)
    deployed = [project.manifest("local", "reference"), project.receipt("local", "reference")]
    first = [*deployed, project.host_record("local")]
    views = [*project.all_views(), *(f"results/{run.warmup_view}" for run in project.plan.runs)]
    last = [f"results/tables/{name}.csv" for name in TABLES] + ["results/report.html"]
    last.append(f"results/{project.tables_plan}")
    last += [f"results/figures/{name}.{ending}" for name in FIGURES for ending in ("pdf", "png", "svg", "csv")]
    began = time.time() - 60
    for stage, paths in enumerate((first, views, last)):
        for path in map(clone.root.joinpath, map(str, paths)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"status": "ok", "reason": null}')
            os.utime(path, (began + stage, began + stage))


def seconds(clone: Clone, *arguments: str) -> float:
    """Wall seconds of one snakemake call that must succeed."""
    began = time.perf_counter()
    clone.snakemake(*arguments)
    return time.perf_counter() - began


def within(what: str, times: list[float], bar: float) -> bool:
    """Print the median and the range, and return whether the median is below the bar."""
    spread = f"{min(times):.2f} to {max(times):.2f} s, n = {len(times)}"
    print(f"{what}: median {median(times):.2f} s, {spread}, bar {bar:.0f} s")
    return median(times) < bar


def main() -> int:
    """Time both calls, print median and range, and return 1 when a median is above its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="runs, and cells, of the plan")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        clone = large_clone(Path(folder) / "clone", runs)
        dry = within(f"snakemake -n, {runs} cells to measure", [seconds(clone, "-n") for _ in range(TIMES)], DRY_RUN_S)
        os.chdir(clone.root)
        pretend_done(clone)
        no_op = within(f"snakemake, {runs} cells, nothing to do", [seconds(clone) for _ in range(TIMES)], NO_OP_S)
    return 0 if dry and no_op else 1


if __name__ == "__main__":
    sys.exit(main())
