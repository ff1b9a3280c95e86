"""Install an engine's environment on a target (rule deploy_environment)."""

from contextlib import closing
from pathlib import Path

from ddtree_bench.environments.deploy import deploy
from ddtree_bench.launchers import target_launcher
from ddtree_bench.project import open_project
from ddtree_bench.records.files import write_json
from ddtree_bench.rule_log import logged_to
from ddtree_bench.target_checks import check_target

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    target = snakemake.params.target
    if project.over_ssh(target):
        check_target(project, target, report)
    with closing(target_launcher(project, target, report)) as launcher:
        receipt = deploy(
            launcher,
            Path(snakemake.input.manifest).parent,
            launcher.expand(project.deploy_root(target)),
            adopt=project.adopted(target, snakemake.params.engine),
            report=report,
        )
    write_json(Path(snakemake.output.receipt), receipt)
