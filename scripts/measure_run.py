"""Measure one run (rules of rules/benchmark.smk)."""

import json
from pathlib import Path

from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to
from ddtree_bench.run import measure_run

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    measure_run(project, project.plan.run(json.loads(snakemake.params.run)), report)
