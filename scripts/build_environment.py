"""Build an engine's environment (rule build_environment)."""

from pathlib import Path

from ddtree_bench.environments import Environment
from ddtree_bench.environments.build import build
from ddtree_bench.environments.recipes import build_named
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to
from ddtree_bench.target_checks import check_target

with logged_to(snakemake.log[0]) as report:
    root, engine = Path(snakemake.scriptdir).parent, snakemake.params.engine
    manifest = Path(snakemake.output.manifest)
    if not manifest.exists():
        # It takes minutes, which are spent in vain for a host that cannot be used.
        project = open_project(snakemake.config, root)
        for target in project.hosts_of(engine, manifest.parent.name):
            check_target(project, target, report)
    build(
        Environment(engine, build_named(snakemake.wildcards.environment)),
        root / "envs",
        manifest.parent,
        report=report,
    )
    # What was there already is as good as new.
    manifest.touch()
