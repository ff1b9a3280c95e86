"""Install an engine's environment on a target (rule deploy_environment)."""

from pathlib import Path

from ddtree_bench.environments.deploy import deploy
from ddtree_bench.hosts import target_launcher
from ddtree_bench.project import open_project
from ddtree_bench.records.files import write_json
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    target = snakemake.params.target
    receipt = deploy(
        target_launcher(project, target),
        Path(snakemake.input.manifest).parent,
        project.deploy_root(target),
        adopt=project.adopted(target, snakemake.params.engine),
        report=report,
    )
    write_json(Path(snakemake.output.receipt), receipt)
