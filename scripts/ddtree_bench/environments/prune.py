"""Remove from a target by rule what nothing needs there any more."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ddtree_bench.environments import remover
from ddtree_bench.environments.recipes import PURE_TAG, EnvironmentFailed
from ddtree_bench.targets.launcher import Launcher

LOOK_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 1800.0
GIB = 2**30


@dataclass(frozen=True)
class Removed:
    """What was removed from a target, by its path there, and the bytes that it took of the disk."""

    path: str
    n_bytes: int

    def __str__(self) -> str:
        return f"{self.path} ({self.n_bytes / GIB:.2f} GiB)"


def prune_environments(
    launcher: Launcher, root: str, keep_names: Collection[str], keep_recent: int, report: Callable[[str], None]
) -> list[Removed]:
    """Remove what nothing needs any more below `root`, an absolute path of the target, and return what that was.

    Environments that are neither named in `keep_names`, by their folders' names, nor among the `keep_recent` others
    that a deployment has seen last; what installations have left that were broken off; wheels and interpreters that
    were sent and serve no environment; archives of this package but the newest; measured cells that nobody has fetched
    for seven days. Nothing that a process runs from, and nothing that is not ours.

    Raises EnvironmentFailed and TargetError.
    """
    if launcher.run_command(["test", "-d", root], timeout_s=LOOK_TIMEOUT_S).exit_code != 0:
        return []
    python = launcher.python(PURE_TAG)
    request = {"root": root.rstrip("/"), "keep": sorted(keep_names), "keep_recent": keep_recent}
    result = launcher.run_command(
        [python, "-B", "-", json.dumps(request)],
        timeout_s=REMOVE_TIMEOUT_S,
        stdin=Path(remover.__file__).read_text(),
        report=lambda line: report(line) if not line.startswith("[") else None,
    )
    if result.exit_code != 0:
        raise EnvironmentFailed(f"{root}: removing what is old failed: {result.stderr.strip()}")
    return [Removed(entry["path"], entry["bytes"]) for entry in json.loads(result.stdout.splitlines()[-1])]
