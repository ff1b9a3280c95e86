"""The spool on a target: what load clients there are asked for, and what they gave until it is in the store.

A folder a cell and workflow, `<short plan key>-<short host key>-<digest of the workflow>`. A client writes `done.json`
last, and lives on when the machine that asked is lost; so the workflow's next run on the target finds what it gave.
Everything here goes under the target's lease, so that no client of another run is at work.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddtree_bench import keys
from ddtree_bench.load.on_target import REQUEST, ClientRequest, read_request, write_request
from ddtree_bench.load.outcome import DONE, CellOutcome, OutcomeDamaged, read_outcome
from ddtree_bench.targets.launcher import CommandResult, Launcher, TargetError
from ddtree_bench.targets.lease import Owner

SPOOL = "spool"
DAMAGED = "damaged"
COMMAND_S = 60.0

NOT_SO = 1
"""Exit status of test(1)."""


@dataclass(frozen=True)
class Spooled:
    """What a client on the target was asked for, and what it gave."""

    request: ClientRequest
    outcome: CellOutcome


class Spool:
    """The spool below the folder on the target that holds what is deployed, as the workflow of `owner` sees it."""

    def __init__(self, launcher: Launcher, root: str, owner: Owner) -> None:
        self._launcher = launcher
        self.owner = owner
        self.folder = f"{launcher.expand(root).rstrip('/')}/{SPOOL}"
        self._workflow = keys.short(keys.digest([owner.user, owner.host, owner.workflow]))

    def entry(self, draft: Mapping[str, Any]) -> str:
        """The name of this workflow's entry of a cell on a host, whose keys the draft of its record has."""
        return f"{entry_of(draft['plan_key'], draft['host_key'])}-{self._workflow}"

    def is_own(self, entry: str) -> bool:
        """Whether this workflow has asked for an entry. A target and a login can be those of several."""
        return entry.endswith(f"-{self._workflow}")

    def path(self, entry: str) -> str:
        """Where an entry lies on the target."""
        return f"{self.folder}/{entry}"

    def add(self, entry: str, request: ClientRequest) -> None:
        """Put what a client is asked for into an entry of its own; one of that name that has not ended is gone."""
        self.remove(entry)
        with TemporaryDirectory(prefix="ddtree-bench-") as here:
            write_request(request, Path(here))
            self._launcher.copy_in(Path(here) / REQUEST, f"{self.path(entry)}/{REQUEST}")

    def entries(self) -> list[str]:
        """The names of what lies in the spool, which is made where there is none. Raises TargetError."""
        script = f"mkdir -p -- {shlex.quote(self.folder)} && ls -1 -- {shlex.quote(self.folder)}"
        return self._run(["sh", "-c", script]).stdout.splitlines()

    def finished(self, entry: str) -> bool:
        """Whether the client of an entry has done, with an outcome or without."""
        return self._run(["test", "-f", f"{self.path(entry)}/{DONE}"], NOT_SO).exit_code == 0

    def fetch(self, entry: str) -> Spooled:
        """Bring an entry here. Raises OutcomeDamaged when it is not what was asked for and what the client wrote."""
        with TemporaryDirectory(prefix="ddtree-bench-") as here:
            folder = Path(here) / entry
            self._launcher.copy_out(self.path(entry), folder)
            outcome = read_outcome(folder)
            try:
                request = read_request(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise OutcomeDamaged(f"{REQUEST} cannot be read: {error}") from error
        return Spooled(request, replace(outcome, spooled=request.id))

    def remove(self, entry: str) -> None:
        """Remove an entry from the target, if it is there."""
        self._run(["rm", "-rf", "--", self.path(entry)])

    def move_aside(self, entry: str) -> str:
        """Move a damaged entry to where it is in nobody's way; returns that place."""
        aside = f"{self.folder}/{DAMAGED}/{entry}"
        script = f"rm -rf -- {shlex.quote(aside)} && mkdir -p -- {shlex.quote(f'{self.folder}/{DAMAGED}')}"
        self._run(["sh", "-c", f"{script} && mv -- {shlex.quote(self.path(entry))} {shlex.quote(aside)}"])
        return aside

    def _run(self, argv: Sequence[str], *good: int) -> CommandResult:
        """Run a command on the target. Raises TargetError when it ends with another status than 0 or a good one."""
        result = self._launcher.run_command(argv, timeout_s=COMMAND_S)
        if result.exit_code not in (0, *good):
            raise TargetError(f"{self.folder}: {argv[0]} failed: {result.stderr.strip()}; see to its rights and disk")
        return result


def entry_of(plan_key: str, host_key: str) -> str:
    """Return how the names of all entries of a cell on a host begin."""
    return f"{keys.short(plan_key)}-{keys.short(host_key)}"
