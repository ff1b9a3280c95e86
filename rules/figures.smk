"""Figures for papers: PDF, PNG and SVG, and the CSV of what each shows.

Input: the tables alone.
"""

FIGURE_NAMES = ("budget_sweep", "concurrency", "speedup", "acceptance")
FORMATS = ("pdf", "png", "svg", "csv")
FIGURES = expand(
    f"{RESULTS}/figures/{{figure}}.{{format}}", figure=FIGURE_NAMES, format=FORMATS
)


rule plot_budget_sweep:
    input:
        rules.make_tables.output,
    output:
        multiext(f"{RESULTS}/figures/budget_sweep", ".pdf", ".png", ".csv"),
        report(
            f"{RESULTS}/figures/budget_sweep.svg",
            caption="captions/budget_sweep.rst",
            category="Figures",
            labels={"figure": "Budget sweep"},
        ),
    log:
        f"{RESULTS}/logs/figures/budget_sweep.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    message:
        "Drawing the budget sweep"
    script:
        "../scripts/plot_budget_sweep.py"


rule plot_concurrency:
    input:
        rules.make_tables.output,
    output:
        multiext(f"{RESULTS}/figures/concurrency", ".pdf", ".png", ".csv"),
        report(
            f"{RESULTS}/figures/concurrency.svg",
            caption="captions/concurrency.rst",
            category="Figures",
            labels={"figure": "Concurrency: where AR overtakes"},
        ),
    log:
        f"{RESULTS}/logs/figures/concurrency.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    message:
        "Drawing throughput over concurrency"
    script:
        "../scripts/plot_concurrency.py"


rule plot_speedup:
    input:
        rules.make_tables.output,
    output:
        multiext(f"{RESULTS}/figures/speedup", ".pdf", ".png", ".csv"),
        report(
            f"{RESULTS}/figures/speedup.svg",
            caption="captions/speedup.rst",
            category="Figures",
            labels={"figure": "Speed-up against AR"},
        ),
    log:
        f"{RESULTS}/logs/figures/speedup.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    message:
        "Drawing the speed-up and its factors"
    script:
        "../scripts/plot_speedup.py"


rule plot_acceptance:
    input:
        rules.make_tables.output,
    output:
        multiext(f"{RESULTS}/figures/acceptance", ".pdf", ".png", ".csv"),
        report(
            f"{RESULTS}/figures/acceptance.svg",
            caption="captions/acceptance.rst",
            category="Figures",
            labels={"figure": "Acceptance by depth"},
        ),
    log:
        f"{RESULTS}/logs/figures/acceptance.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    message:
        "Drawing acceptance by depth"
    script:
        "../scripts/plot_acceptance.py"
