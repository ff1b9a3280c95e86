"""Train a micro model (rules of rules/micro_models.smk)."""

from pathlib import Path

from ddtree_bench.client_machine import training_lease
from ddtree_bench.hosts import read_json, target_launcher
from ddtree_bench.micro_models import train
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to
from ddtree_bench.targets.lifeline import Interruption, tied_to_ancestors

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    server = next(one for one in project.plan.servers if one.key == snakemake.params.server)
    python = read_json(Path(snakemake.input.receipt[0]))["python"]
    with (
        Interruption(),
        tied_to_ancestors(),
        training_lease(project, f"train {snakemake.params.server[:12]}", report),
    ):
        train(project.micro_model(server), target_launcher(project, server.target), python, report)
