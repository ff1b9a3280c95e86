"""Measure: one rule a run, which starts one server afresh and measures the cells that the store lacks.

Input: the deployment, the micro model that is served, if it is one, and the record of the target, whose time moves only
when a host key changes. Output: the views of the run's cells and its warm-up record.
Order: the runs' priorities; one run at a time on a target, and on this machine as many as may share it with their load
clients: the resources here, the leases on the machines themselves.
"""

RETRY = f"{RESULTS}/retry/{INVOCATION}"


rule request_retry:
    """Make the runs with cells to be retried look again, in this pass alone (--config retry_failed=true)."""
    output:
        temp(touch(RETRY)),
    log:
        f"{RESULTS}/logs/request_retry.log",
    conda:
        "../envs/workflow.yaml"


for run in PLAN.runs:

    rule:
        name:
            run.name
        input:
            receipt=[ancient(path) for path in PROJECT.receipts_of(run.server)],
            models=[ancient(path) for path in PROJECT.micro_receipts([run.server])],
            host=PROJECT.host_record(run.server.target),
            retry=RETRY if run in RETRIED else [],
        output:
            cells=PROJECT.views(run),
            warmup=f"{RESULTS}/{run.warmup_view}",
        log:
            f"{RESULTS}/logs/runs/{run.server.target}/{run.server.name}-r{run.repeat}.log",
        priority: run.priority
        conda:
            "../envs/workflow.yaml"
        threads: 1
        resources:
            **{
                f"host_{run.server.target}": 1,
                CLIENT_MACHINE: client_units(
                    PROJECT.config.targets[run.server.target]
                ),
            },
        params:
            run=keys.canonical(run.identity),
        message:
            f"Run of {run.server.name} on {run.server.target}, repeat {run.repeat}"
        script:
            "../scripts/measure_run.py"


localrules:
    measure,


rule measure:
    input:
        PROJECT.all_views(),
