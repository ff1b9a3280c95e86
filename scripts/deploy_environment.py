"""Install an engine's environment on a target (rule deploy_environment)."""

from pathlib import Path

from ddtree_bench.deployment import deploy_planned
from ddtree_bench.project import open_project
from ddtree_bench.records.files import write_json
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    receipt = deploy_planned(project, snakemake.params.target, snakemake.params.engine, report)
    write_json(Path(snakemake.output.receipt), receipt)
