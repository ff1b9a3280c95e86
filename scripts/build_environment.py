"""Build an engine's environment (rule build_environment)."""

from pathlib import Path

from ddtree_bench.environments import Environment
from ddtree_bench.environments.build import build
from ddtree_bench.environments.recipes import build_named
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    manifest = Path(snakemake.output.manifest)
    build(
        Environment(snakemake.params.engine, build_named(snakemake.wildcards.environment)),
        Path(snakemake.scriptdir).parent / "envs",
        manifest.parent,
        report=report,
    )
    # What was there already is as good as new.
    manifest.touch()
