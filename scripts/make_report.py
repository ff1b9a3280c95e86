"""Write the HTML report (rule make_report)."""

from pathlib import Path

from ddtree_bench.outputs import commands_of_all, make_report
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to
from ddtree_bench.tables import read_tables

with logged_to(snakemake.log[0]) as report:
    project = open_project(
        snakemake.config, Path(snakemake.scriptdir).parent, config_files=snakemake.params.config_files
    )
    tables = read_tables(Path(snakemake.input.tables[0]).parent)
    report(f"written: {make_report(project, tables, project.folders.results, commands_of_all(project))}")
