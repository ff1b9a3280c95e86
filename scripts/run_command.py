"""Print what a status command says (rules of rules/status.smk)."""

from pathlib import Path

from ddtree_bench.commands import run_command
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    project = open_project(
        snakemake.config, Path(snakemake.scriptdir).parent, config_files=snakemake.params.config_files
    )
    print(run_command(snakemake.params.command, project, report))
