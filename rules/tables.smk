"""Tables of everything that was measured, as CSV.

Input: the views of all cells of the plan; the raw data they name in the store. Columns: docs/tables.md.
"""

TABLES = (
    "cells",
    "runs",
    "speedup",
    "acceptance",
    "budget",
    "crossovers",
    "requests",
)


rule make_tables:
    input:
        cells=PROJECT.all_views(),
        warmups=[f"{RESULTS}/{run.warmup_view}" for run in PLAN.runs],
    output:
        **{table: f"{RESULTS}/tables/{table}.csv" for table in TABLES},
        plan=f"{RESULTS}/{PROJECT.tables_plan}",
    log:
        f"{RESULTS}/logs/tables.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    message:
        "Making the tables"
    script:
        "../scripts/make_tables.py"
