"""Say where a trained drafter lies and how it is taken (rule train_drafter)."""

from pathlib import Path

from ddtree_bench.drafter_training import DrafterTraining
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    report(DrafterTraining.of(open_project(snakemake.config, Path(snakemake.scriptdir).parent)).installation)
