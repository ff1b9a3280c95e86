"""The plan of this configuration, and what keeps runs on one target apart.

Input: the merged configuration and config/prompts/. Everything that thinks is in scripts/ddtree_bench.
"""

from pathlib import Path

from snakemake.exceptions import WorkflowError

from ddtree_bench import keys
from ddtree_bench.client_machine import LIMIT as CLIENT_LIMIT
from ddtree_bench.client_machine import RESOURCE as CLIENT_MACHINE
from ddtree_bench.client_machine import client_units
from ddtree_bench.config import ConfigError
from ddtree_bench.project import open_project
from ddtree_bench.status import runs_with_failures, summary
from ddtree_bench.working_folder import (
    announce_main_process,
    drop_stale_locks,
    invocation_id,
)

try:
    PROJECT = open_project(config, root=Path(workflow.basedir))
except ConfigError as error:
    raise WorkflowError(str(error)) from None

PLAN = PROJECT.plan
RESULTS = str(PROJECT.folders.results)
CONFIG_FILES = [str(path) for path in workflow.overwrite_configfiles]

RETRIED = runs_with_failures(PROJECT) if PROJECT.config.retry_failed else frozenset()

# The main process names the pass and itself; the processes it starts inherit both.
INVOCATION = invocation_id()
announce_main_process()

# Held for as long as this process lives.
FOLDER_LOCK = drop_stale_locks(Path.cwd()) if workflow.is_main_process else None

# A limit in a profile would vanish with any --resources on the command line; these defaults stay.
workflow.global_resources.setdefault(CLIENT_MACHINE, CLIENT_LIMIT)
for target in PLAN.targets:
    workflow.global_resources.setdefault(f"host_{target}", 1)


wildcard_constraints:
    target="|".join(PROJECT.config.targets),
    engine="reference|sglang|client",
    environment="([a-z][a-z0-9-]*-)?[0-9a-f]{12}-(cp[0-9]+|py3)",
