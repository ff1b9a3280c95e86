"""Tables, figures and a report from what the store holds now, naming what is absent."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ddtree_bench.figures import FIGURES
from ddtree_bench.outputs import make_report, make_tables, snakemake_command
from ddtree_bench.plan import Cell
from ddtree_bench.project import Project, Report
from ddtree_bench.records.files import write_json
from ddtree_bench.records.store import Attempt, Store
from ddtree_bench.records.views import cell_view, warmup_view
from ddtree_bench.status import cell_statuses
from ddtree_bench.tables import write_tables


def partial(project: Project, report: Report) -> str:
    """Make tables, figures and a report below results/partial; returns what is absent and where the report is."""
    folder = project.folders.results / "partial"
    statuses = cell_statuses(project)
    present = {status.cell: status.attempt for status in statuses if status.attempt is not None}
    missing = [status.cell.view for status in statuses if status.attempt is None]
    tables = make_tables(project, _write_views(project, present))
    write_tables(tables, folder / "tables")
    for name, figure in FIGURES.items():
        report(f"drawing {name}")
        figure.draw(tables, folder / "figures" / name)
    commands = {"everything": f"{snakemake_command(project)} -- partial"}
    page = make_report(project, tables, folder, commands, missing)
    absent = [f"absent: {view}" for view in missing]
    return "\n".join([*absent, f"{len(present)} of {len(statuses)} cells are there", f"report: {page}"])


def _write_views(project: Project, present: dict[Cell, Attempt]) -> list[Path]:
    """Write the views of the cells that are there, and of the starts they were measured on, below results/partial."""
    store, folder = Store(project.folders.store), project.folders.results / "partial"
    paths = []
    by_run: dict[tuple[str, int], list[Attempt]] = defaultdict(list)
    for cell, attempt in present.items():
        by_run[(cell.server.key, cell.repeat)].append(attempt)
        paths.append(folder / cell.view)
        write_json(paths[-1], cell_view(cell, attempt, store))
    for run in project.plan.runs:
        if attempts := by_run.get((run.server.key, run.repeat)):
            paths.append(folder / run.warmup_view)
            write_json(paths[-1], warmup_view(run, attempts))
    return paths
