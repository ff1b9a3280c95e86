"""Build an engine's environment: a wheelhouse and its manifest.

Input: pins and sources in envs/<engine>/ (their digest is the environment's key). Needs a package index.
"""


rule build_environment:
    output:
        # A wheelhouse that is complete is kept, whatever else makes Snakemake run this.
        manifest=update(
            f"{PROJECT.folders.environments}/{{engine}}-{{environment}}/manifest.json"
        ),
    log:
        f"{RESULTS}/logs/environment/{{engine}}-{{environment}}.log",
    conda:
        "../envs/workflow.yaml"
    threads: 1
    params:
        engine="{engine}",
    message:
        "Building the environment of {wildcards.engine} ({wildcards.environment})"
    script:
        "../scripts/build_environment.py"
