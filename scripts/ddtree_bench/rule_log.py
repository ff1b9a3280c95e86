"""What a rule's script says: to the terminal as it comes, and with the time to the rule's log, errors included."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ddtree_bench.config import ConfigError
from ddtree_bench.environments import EnvironmentFailed
from ddtree_bench.records.store import StoreError
from ddtree_bench.servers.ready import ServerFailed
from ddtree_bench.tables import TablesError
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.lifeline import Interrupted

USER_ERRORS = (ConfigError, EnvironmentFailed, ServerFailed, StoreError, TablesError, TargetError)
"""Errors whose message says what to do; a traceback would hide it."""


@contextmanager
def logged_to(log: Path | str) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports a line; end the process with status 1 on an error that a user can mend.

    Other errors pass on with their traceback, which the log gets too.
    """
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:

        def report(line: str) -> None:
            print(f"{datetime.now():%H:%M:%S} {line}", file=file, flush=True)
            print(line, file=sys.stderr, flush=True)

        try:
            yield report
        except Interrupted as interrupted:
            report(str(interrupted))
            sys.exit(interrupted.exit_status)
        except USER_ERRORS as error:
            report(f"error: {error}")
            sys.exit(1)
        except BaseException:
            file.write(traceback.format_exc())
            raise
