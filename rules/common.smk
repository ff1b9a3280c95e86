"""The plan of this configuration, and what keeps runs on one target apart.

Input: the merged configuration and config/prompts/. Everything that thinks is in scripts/ddtree_bench.
"""

from pathlib import Path

from snakemake.exceptions import WorkflowError

from ddtree_bench import keys
from ddtree_bench.config import ConfigError
from ddtree_bench.project import invocation_id, open_project
from ddtree_bench.status import runs_with_failures, summary

try:
    PROJECT = open_project(config, root=Path(workflow.basedir))
except ConfigError as error:
    raise WorkflowError(str(error)) from None

PLAN = PROJECT.plan
RESULTS = str(PROJECT.places.results)
CONFIG_FILES = [str(path) for path in workflow.overwrite_configfiles]

RETRIED = runs_with_failures(PROJECT) if PROJECT.config.retry_failed else frozenset()

# The main process names the pass; the processes it starts inherit the name.
INVOCATION = invocation_id()

# A limit in a profile would vanish with any --resources on the command line; these defaults stay.
for target in PLAN.targets:
    workflow.global_resources.setdefault(f"host_{target}", 1)


wildcard_constraints:
    target="|".join(PROJECT.config.targets),
    engine="reference|sglang",
    environment="[0-9a-f]{12}",
