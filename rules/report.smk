"""One static HTML page that holds figures, tables, provenance and the commands that repeat each.

Input: the tables and the figures.
"""


rule make_report:
    input:
        tables=rules.make_tables.output,
        figures=FIGURES,
    output:
        page=f"{RESULTS}/report.html",
    log:
        f"{RESULTS}/logs/report.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    params:
        config_files=CONFIG_FILES,
    message:
        "Writing the report"
    script:
        "../scripts/make_report.py"
