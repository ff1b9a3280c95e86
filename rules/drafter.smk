"""Train a drafter for the embedded engine: a rule a stage, and `train_drafter`, which asks for them all.

Input: templates and topics in envs/reference/training/; parameters from `training`. It measures nothing, is no part of
`all`, and writes to results/drafter/ alone. A stage that was killed goes on: its working files are not declared, only the
marker that says that it has ended.
"""

from ddtree_bench.drafter_training import DrafterTraining

TRAINING = DrafterTraining.of(PROJECT)


for stage in TRAINING.stages:

    rule:
        name:
            f"drafter_{stage.name}"
        input:
            stage.inputs,
        output:
            touch(stage.output) if stage.marked else stage.output,
        log:
            f"{RESULTS}/logs/drafter/{stage.name}.log",
        conda:
            "../envs/workflow.yaml"
        threads: PROJECT.config.training.threads if stage.parallel else 1
        resources:
            **{CLIENT_MACHINE: CLIENT_LIMIT},
        params:
            stage=stage.name,
        message:
            stage.description
        script:
            "../scripts/run_drafter_stage.py"


localrules:
    train_drafter,


rule train_drafter:
    """Train a drafter and say how to take it; the committed one is left alone."""
    input:
        TRAINING.stages[-1].output,
    log:
        f"{RESULTS}/logs/train_drafter.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    message:
        "The drafter is trained"
    script:
        "../scripts/train_drafter.py"
