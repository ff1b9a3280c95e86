"""Record what a target is (rule probe_target)."""

from pathlib import Path

from ddtree_bench.hosts import record_host
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to

with logged_to(snakemake.log[0]) as report:
    project = open_project(snakemake.config, Path(snakemake.scriptdir).parent)
    record_host(project, snakemake.params.target, report)
