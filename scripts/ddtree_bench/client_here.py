"""The load client on this machine: what it measures goes through the link to the target, if there is one."""

from __future__ import annotations

from dataclasses import replace

from ddtree_bench.link_watch import while_linked
from ddtree_bench.load.observed import measure_observed
from ddtree_bench.load.outcome import CellOutcome
from ddtree_bench.plan import Cell
from ddtree_bench.project import Report
from ddtree_bench.running_server import CellFailed, RunningServer
from ddtree_bench.targets.launcher import Launcher


class ClientHere:
    """Measures the cells of one server from this process."""

    def __init__(self, server: RunningServer, launcher: Launcher, report: Report) -> None:
        self._server = server
        self._launcher = launcher
        self._report = report

    def measure(self, cell: Cell) -> CellOutcome:
        """Measure a cell, again when the link was cut meanwhile.

        Raises as `RunningServer.judged` and `while_linked`.
        """
        (outcome, failure), link = while_linked(self._server, cell.title, lambda: self._measured(cell), self._report)
        outcome = replace(outcome, link=link)
        if failure is not None:
            raise CellFailed(failure, outcome)
        return outcome

    def _measured(self, cell: Cell) -> tuple[CellOutcome, CellFailed | None]:
        """What a cell gave, and how the server failed it, if it did."""
        not_flushed = self._server.flush()
        work = self._server.work(cell)
        outcome = measure_observed(
            work,
            fetch_log=self._launcher.fetch_log,
            ended=self._server.ended,
            telemetry=self._server.telemetry(),
        )
        outcome = replace(outcome, cache_not_flushed=not_flushed)
        try:
            return self._server.judged(outcome, work.name), None
        except CellFailed as failure:
            return outcome, failure
