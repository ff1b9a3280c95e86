"""What is planned, what is there, and how to tidy up: thin targets over `python -m ddtree_bench`.

Each of these always runs and starts no server. What other rules read is written by `probe` alone, and `prune` removes only
views that no rule of this plan makes, and from hosts what none of its targets needs.
"""

COMMANDS = {
    "plan": "Servers, cells and the time they will take",
    "explain": "Why each cell is cached or to be measured",
    "partial": "Tables, figures and report from what the store holds now",
    "probe": "Record anew what the targets are",
    "verify": "Check the store against its digests",
    "prune": "Remove views that no cell of the plan stands for, and old environments from hosts",
    "check_targets": "Look whether every target can be used",
    "stop_all": "Stop every server that this workflow left on its targets",
}


localrules:
    plan,
    explain,
    partial,
    probe,
    verify,
    prune,
    check_targets,
    stop_all,


for command, description in COMMANDS.items():

    rule:
        name:
            command
        log:
            f"{RESULTS}/logs/{command}.log",
        conda:
            "../envs/workflow.yaml"
        threads: 1
        params:
            command=command,
            config_files=CONFIG_FILES,
        message:
            description
        script:
            "../scripts/run_command.py"
