"""Build an engine's environment (rule build_environment)."""

from pathlib import Path

from ddtree_bench.environments import Environment
from ddtree_bench.environments.build import build
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    build(
        Environment(snakemake.params.engine, snakemake.params.build),
        Path(snakemake.scriptdir).parent / "envs",
        Path(snakemake.output.manifest).parent,
        report=report,
    )
