"""Train the micro models of the configuration: a rule each, with the Python of SGLang's deployed environment.

Input: the environment's receipt on the target that serves the model; sources in envs/sglang/micro_models/, whose digest
is in the folder's name. Output: the file that the training writes last, beside target and drafter. It trains beside no run.
"""

MICRO_MODELS = {
    micro: server
    for server in PLAN.servers
    if (micro := PROJECT.micro_model(server)) is not None
}


def micro_models_of(servers):
    """The files that show that the micro models of servers are trained: none where they serve others."""
    found = [PROJECT.micro_model(server) for server in servers]
    return list(dict.fromkeys(str(micro.finished) for micro in found if micro))


for micro, server in MICRO_MODELS.items():

    rule:
        name:
            micro.rule
        input:
            receipt=[ancient(path) for path in PROJECT.receipts_of(server)],
        output:
            finished=str(micro.finished),
        log:
            f"{RESULTS}/logs/micro_models/{micro.folder.name}.log",
        conda:
            "../envs/workflow.yaml"
        threads: 1
        resources:
            **{f"host_{server.target}": 1, CLIENT_MACHINE: 1},
        params:
            server=server.key,
        message:
            f"Training the {micro.kind} micro model and its drafter"
        script:
            "../scripts/train_micro_model.py"
