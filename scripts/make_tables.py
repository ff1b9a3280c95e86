"""Make the tables of everything that was measured (rule make_tables)."""

from pathlib import Path

from ddtree_bench.project import open_project
from ddtree_bench.reporting import make_tables
from ddtree_bench.rule_log import reporting
from ddtree_bench.tables import write_tables

with reporting(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    tables = make_tables(project, [Path(path) for path in snakemake.input])
    for path in write_tables(tables, Path(snakemake.output[0]).parent):
        report(f"written: {path}")
