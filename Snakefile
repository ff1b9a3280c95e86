"""Benchmark DDTree speculative decoding: environments, deployments, runs, tables, figures and a report.

Configuration: config/config.yaml; lay another file over it with --configfile. See README.md.
"""

from snakemake.utils import min_version

min_version("9.0")


configfile: "config/config.yaml"


report: "rules/captions/workflow.rst"


include: "rules/common.smk"
include: "rules/environment.smk"
include: "rules/deploy.smk"
include: "rules/micro_models.smk"
include: "rules/benchmark.smk"
include: "rules/tables.smk"
include: "rules/figures.smk"
include: "rules/report.smk"
include: "rules/drafter.smk"
include: "rules/status.smk"


localrules:
    all,


rule all:
    default_target: True
    input:
        rules.measure.input,
        rules.make_tables.output,
        FIGURES,
        rules.make_report.output,


onsuccess:
    print(summary(PROJECT))


onerror:
    print(summary(PROJECT))
