"""Install an engine's environment on a target, and record what the target is.

Input: the wheelhouse of build_environment; parameters from targets.<name>.
"""


rule deploy_environment:
    input:
        manifest=lambda wildcards: PROJECT.manifest(wildcards.target, wildcards.engine),
    output:
        receipt=f"{RESULTS}/targets/{{target}}/deployed-{{engine}}-{{environment}}{{adopted}}.json",
    log:
        f"{RESULTS}/logs/deploy/{{target}}-{{engine}}-{{environment}}{{adopted}}.log",
    wildcard_constraints:
        # Which installation is adopted, if one is.
        adopted="(-[0-9a-f]{6})?",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    params:
        target="{target}",
        engine="{engine}",
    message:
        "Deploying {wildcards.engine} ({wildcards.environment}) on {wildcards.target}"
    script:
        "../scripts/deploy_environment.py"


rule probe_target:
    input:
        receipts=lambda wildcards: PROJECT.receipts(wildcards.target),
        models=lambda wildcards: [
            ancient(path)
            for path in PROJECT.micro_receipts(
                server for server in PLAN.servers if server.target == wildcards.target
            )
        ],
    output:
        record=f"{RESULTS}/targets/{{target}}.json",
    log:
        f"{RESULTS}/logs/probe/{{target}}.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    params:
        target="{target}",
        # Another endpoint, another way to treat it, or another installation to adopt, is to be looked at as soon as the
        # configuration names it.
        endpoint=lambda wildcards: PROJECT.endpoint_keys(wildcards.target),
    message:
        "Recording what {wildcards.target} is"
    script:
        "../scripts/probe_target.py"


localrules:
    deploy,


rule deploy:
    input:
        [PROJECT.receipts(target) for target in PLAN.targets],
