"""The load client on the target itself: started from here, left alone while it measures, fetched when it has done."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddtree_bench.link_watch import while_linked
from ddtree_bench.load.on_target import ClientRequest
from ddtree_bench.load.outcome import CellOutcome, OutcomeDamaged
from ddtree_bench.plan import Cell
from ddtree_bench.project import Report
from ddtree_bench.running_server import RunningServer
from ddtree_bench.spool import Spool
from ddtree_bench.targets import host_tools
from ddtree_bench.targets.launcher import Launcher, TargetError

MODULE = "ddtree_bench.load.on_target"

POLL_S = 1.0
REPORT_EVERY_S = 30.0

SAID_CHARS = 500
"""How much of what a client wrote is told when it fails."""

SPARE_S = 600.0
"""How much longer than a cell's own limit its client may take."""


@dataclass(frozen=True)
class ClientPlace:
    """Where load clients run on a target: their interpreter there, and the spool through which they are asked."""

    python: str
    spool: Spool


class ClientOnTarget:
    """Measures the cells of one server from the target; a link that is cut meanwhile is in no measurement."""

    def __init__(self, server: RunningServer, launcher: Launcher, place: ClientPlace, report: Report) -> None:
        self._server = server
        self._launcher = launcher
        self._python = place.python
        self._spool = place.spool
        self._report = report

    def measure(self, cell: Cell, draft: Mapping[str, Any]) -> CellOutcome:
        """Measure a cell whose record is to be completed from `draft`.

        Raises as `RunningServer.judged`, and TargetError when the client does not come to its end or the target is not
        reached any more; what the client goes on to measure then is collected by a later run.
        """
        while_linked(self._server, cell.title, self._server.flush, self._report)
        request, entry = self._request(cell, draft), self._spool.entry(draft)
        self._spool.add(entry, request)
        self._run(entry, request, cell)
        try:
            outcome = self._spool.fetch(entry).outcome
        except OutcomeDamaged as damage:
            raise self._no_outcome(cell, entry, f"gave no outcome: {damage}") from damage
        return self._server.judged(outcome, request.work.name)

    def _request(self, cell: Cell, draft: Mapping[str, Any]) -> ClientRequest:
        return ClientRequest(
            id=uuid.uuid4().hex,
            work=replace(self._server.work(cell), base_url=self._launcher.target_url()),
            server_pid=self._server.known_state().pid,
            log_argv=self._launcher.log_argv(),
            draft=draft,
            owner=asdict(self._spool.owner),
        )

    def _run(self, entry: str, request: ClientRequest, cell: Cell) -> None:
        """Start the client and wait until it has done. Raises TargetError when it ends without, or not in time."""
        # Another name for each start: what systemd still knows of an earlier one is no state of this one.
        name = f"{entry}-{request.id[:8]}"
        command = host_tools.command(self._python, self._launcher.tools(), MODULE, self._spool.path(entry))
        self._launcher.start_client(name, *command)
        try:
            self._wait(name, cell.title, request.work.limits.cell_s + SPARE_S)
        except TargetError:
            # Out of reach, it measures on: what it gives is collected later.
            raise
        except BaseException:
            self._launcher.stop_client(name)
            raise
        state, said = self._launcher.client_state(name), self._launcher.client_log(name).strip()[-SAID_CHARS:]
        self._launcher.stop_client(name)
        if not self._spool.finished(entry):
            how = "did not come to its end in time" if state.alive else f"{state}, before it had done"
            raise self._no_outcome(cell, entry, f"{how}: {said or 'it said nothing'}")

    def _wait(self, name: str, what: str, limit_s: float) -> None:
        """Wait until the client has ended, or for `limit_s` seconds."""
        began, next_report = time.monotonic(), REPORT_EVERY_S
        while self._launcher.client_state(name).alive:
            seconds = time.monotonic() - began
            if seconds > limit_s:
                return
            if seconds > next_report:
                self._report(f"{what}: measured on the target for {seconds:.0f} s")
                next_report += REPORT_EVERY_S
            time.sleep(POLL_S)

    def _no_outcome(self, cell: Cell, entry: str, how: str) -> TargetError:
        return TargetError(
            f"targets.{cell.server.target}: {cell.title}: the client on the target {how}; see what is there in "
            f"{self._spool.path(entry)}, and run again"
        )
