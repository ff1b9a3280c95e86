"""Train a micro model (rules of rules/micro_models.smk)."""

from contextlib import closing
from pathlib import Path

from ddtree_bench.launchers import target_launcher
from ddtree_bench.micro_training import train_for
from ddtree_bench.project import open_project
from ddtree_bench.records.files import read_json, write_json
from ddtree_bench.rule_log import logged_to
from ddtree_bench.targets.lifeline import Interruption, tied_to_ancestors

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    asked = (snakemake.params.kind, snakemake.params.block_size)
    micro, server = next(
        (micro, server) for micro, server in project.micro_models.items() if (micro.kind, micro.block_size) == asked
    )
    python = read_json(Path(snakemake.input.receipt[0]))["python"]
    with (
        Interruption(),
        tied_to_ancestors(),
        closing(target_launcher(project, server.target, report)) as launcher,
    ):
        train_for(project, server, launcher, python, report)
    write_json(Path(snakemake.output.receipt), {"folder": str(micro.folder), "digest": micro.digest})
