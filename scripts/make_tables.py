"""Make the tables of everything that was measured (rule make_tables)."""

from pathlib import Path

from ddtree_bench.outputs import make_tables
from ddtree_bench.project import open_project
from ddtree_bench.records.files import write_json
from ddtree_bench.rule_log import logged_to
from ddtree_bench.tables import write_tables

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    tables = make_tables(project, [Path(path) for path in snakemake.input])
    folder = Path(snakemake.output.plan).parent
    for path in write_tables(tables, folder):
        report(f"written: {path}")
    for outdated in folder.glob("plan.*.json"):
        outdated.unlink()
    write_json(Path(snakemake.output.plan), list(snakemake.input.cells))
