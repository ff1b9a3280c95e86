"""Build an engine's environment (rule build_environment)."""

from pathlib import Path

from ddtree_bench.deployment import build_planned
from ddtree_bench.environments import Environment
from ddtree_bench.environments.recipes import build_named
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    manifest = Path(snakemake.output.manifest)
    environment = Environment(snakemake.params.engine, build_named(snakemake.wildcards.environment))
    build_planned(project, environment, manifest.parent, report)
    # What was there already is as good as new.
    manifest.touch()
