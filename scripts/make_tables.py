"""Make the tables of everything that was measured (rule make_tables)."""

from pathlib import Path

from ddtree_bench.project import Places
from ddtree_bench.rule_log import reporting
from ddtree_bench.tables import build_tables, write_tables

with reporting(snakemake.log[0]) as report:
    folder = Path(snakemake.output[0]).parent
    views = [Path(path) for path in snakemake.input]
    for path in write_tables(build_tables(views, Places.below(folder.parent).store), folder):
        report(f"written: {path}")
