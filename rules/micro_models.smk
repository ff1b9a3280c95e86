"""Train the micro models of the configuration: a rule each, with the Python of SGLang's deployed environment.

Input: the environment's receipt on the target that serves the model; sources in envs/sglang/micro_models/, whose digest
is in the folder's name. Output: a receipt beside the folder, which is not declared: nothing but another recipe trains
again, whatever makes Snakemake run the rule. It trains beside no run.
"""

from ddtree_bench.micro_models import THREADS as MICRO_MODEL_THREADS

for micro, server in PROJECT.micro_models.items():

    rule:
        name:
            micro.rule
        input:
            receipt=[ancient(path) for path in PROJECT.receipts_of(server)],
        output:
            receipt=str(micro.receipt),
        log:
            f"{RESULTS}/logs/micro_models/{micro.folder.name}.log",
        conda:
            "../envs/workflow.yaml"
        threads: MICRO_MODEL_THREADS
        resources:
            **{f"host_{server.target}": 1, CLIENT_MACHINE: CLIENT_LIMIT},
        params:
            kind=micro.kind,
            block_size=micro.block_size,
        message:
            f"Training the {micro.kind} micro model and its drafter"
        script:
            "../scripts/train_micro_model.py"
