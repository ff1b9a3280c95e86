"""Draw throughput over concurrency, and where AR overtakes, from the tables (rule plot_concurrency)."""

from pathlib import Path

from ddtree_bench.figures import concurrency
from ddtree_bench.rule_log import logged_to
from ddtree_bench.tables import read_tables

with logged_to(snakemake.log[0]) as report:
    for path in concurrency.draw(
        read_tables(Path(snakemake.input[0]).parent), Path(snakemake.output[0]).with_suffix("")
    ):
        report(f"written: {path}")
