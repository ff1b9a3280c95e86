"""One stage of the drafter's training (rules of rules/drafter.smk)."""

import sys
from pathlib import Path

from ddtree_bench.drafter_training import DrafterTraining
from ddtree_bench.project import open_project
from ddtree_bench.training_stage import training_stage
from ddtree_training.cli import main

project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
stage = DrafterTraining.of(project).stage(snakemake.params.stage)
with training_stage(snakemake.log[0], project, f"drafter_{stage.name}"):
    status = main(stage.arguments(snakemake.threads))
sys.exit(status)
