"""One start of a run's server: start, ready, warm up, the cells one after another, and a stop in every case."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddtree_bench.cell_record import CellRecords
from ddtree_bench.client_here import ClientHere
from ddtree_bench.client_on_target import ClientOnTarget, ClientPlace
from ddtree_bench.hosts import server_host_key
from ddtree_bench.link_watch import while_linked
from ddtree_bench.load.cell import Measurement
from ddtree_bench.load.observed import now
from ddtree_bench.load.outcome import CellOutcome
from ddtree_bench.load.prompts import read as read_prompts
from ddtree_bench.load.warmup import warm_up
from ddtree_bench.plan import Cell, Run
from ddtree_bench.project import Project, Report
from ddtree_bench.records.store import Store
from ddtree_bench.running_server import RunningServer, prompts_of
from ddtree_bench.server_start import Start, meet_external, start_planned
from ddtree_bench.servers.ready import ServerFailed
from ddtree_bench.targets.launcher import Launcher
from ddtree_bench.targets.lifeline import Interruption


@dataclass(frozen=True)
class Confirmed:
    """What a run was found to have on its target: the host, what its server runs from, and where load clients run.

    `client` is None where they run on this machine.
    """

    host: Mapping[str, Any]
    receipt: Mapping[str, Any]
    client: ClientPlace | None = None


class RunStart:
    """One start of a run's server and the cells measured on it; `measure` may be called once."""

    def __init__(
        self, project: Project, run: Run, store: Store, launcher: Launcher, confirmed: Confirmed, report: Report
    ) -> None:
        self._project = project
        self._run = run
        self._receipt = confirmed.receipt
        self._records = CellRecords(project, run, store, confirmed.host, confirmed.receipt)
        self._launcher = launcher
        self._host = confirmed.host
        self._client = confirmed.client
        self._report = report
        self._start = self._new_start()

    def measure(self, cells: Sequence[Cell], interruption: Interruption, starts_left: int) -> list[Cell]:
        """Measure cells until all are done or the server fails; returns those that are left for another start.

        When `starts_left` is 0, or the server never became fit to be measured, what is left is stored as failed.
        """
        begun = now()
        pending = list(cells)
        failure = ServerFailed("the server failed in earlier cells of this run, too often to start it again", "")
        try:
            server = self._started_and_warm(cells)
            while pending and self._measure_cell(server, pending.pop(0)):
                continue
        except ServerFailed as error:
            failure = error
            self._report(f"{self._run.server.name}: failed: {failure.reason}")
            if len(cells) == len(self._run.cells):
                # Nothing of this run was measured yet: a server that cannot start cannot start for the next cell.
                starts_left = 0
        finally:
            with interruption.shielded():
                self._launcher.stop()
        if starts_left == 0:
            for cell in pending:
                self._store_failure(self._records.draft(cell, self._start), begun, failure)
            return []
        return pending

    def _new_start(self) -> Start:
        start_id = uuid.uuid4().hex[:12]
        name = f"{self._run.server.name}-r{self._run.repeat}-{start_id}.log"
        log_path = self._project.folders.results / "logs" / "servers" / self._run.server.target / name
        return Start(start_id, log_path.absolute())

    def _started_and_warm(self, cells: Sequence[Cell]) -> RunningServer:
        """Start the server, wait until it answers, warm it up; `_start` says how far that went."""
        planned, project, report = self._run.server, self._project, self._report
        if planned.external:
            key = server_host_key(self._host, planned)
            self._start = meet_external(project, planned, cells[0].workload, self._start, key, report)
        else:
            python = self._receipt["python"]
            self._start = start_planned(project, self._launcher, planned, python, self._start, report)
        server = RunningServer(project, planned, self._launcher, self._host, self._receipt, self._start, report)
        warmup, _ = while_linked(server, f"{planned.name}: the warm-up", lambda: self._warm_up(server, cells), report)
        self._start = replace(self._start, warmup=warmup)
        return server

    def _warm_up(self, server: RunningServer, cells: Sequence[Cell]) -> dict[str, Any]:
        rule, begun, endpoint = cells[0].warmup, time.perf_counter(), server.endpoint
        warmed = warm_up(
            endpoint.base_url,
            endpoint.model,
            ((cell.workload, _most_at_once(cell), prompts_of(self._project, cell)) for cell in cells),
            read_prompts(self._project.root / rule.prompts),
            max_tokens=rule.max_tokens,
            abort=server.ended,
            headers=endpoint.headers,
        )
        server.require_alive("during the warm-up")
        if errors := sorted({error for shape in warmed["shapes"] for error in shape["errors"]}):
            reason = f"the warm-up failed: {'; '.join(errors)}"
            raise server.unreachable(reason) if self._run.server.external else server.failed(reason)
        return {"seconds": time.perf_counter() - begun, "shapes": warmed["shapes"]}

    def _measure_cell(self, server: RunningServer, cell: Cell) -> bool:
        """Measure one cell and store the attempt, failed or not; False when the server is not fit for another one."""
        begun, draft = now(), self._records.draft(cell, self._start)
        try:
            outcome = self._measured(server, cell, draft)
        except ServerFailed as failure:
            self._report(f"{cell.server.name}: failed: {failure.reason}")
            self._store_failure(draft, begun, failure)
            return False
        self._records.add_measured(draft, outcome)
        self._forget(draft)
        self._report(f"{cell.title}: {_in_words(outcome.measurement)}")
        if outcome.server_ended:
            raise server.unreachable(outcome.server_ended)
        return True

    def _measured(self, server: RunningServer, cell: Cell, draft: Mapping[str, Any]) -> CellOutcome:
        if self._client is None:
            return ClientHere(server, self._launcher, self._report).measure(cell)
        return ClientOnTarget(server, self._launcher, self._client, self._report).measure(cell, draft)

    def _store_failure(self, draft: Mapping[str, Any], begun: str, failure: ServerFailed) -> None:
        self._records.add_failed(draft, begun, failure, self._launcher.fetch_log())
        self._forget(draft)

    def _forget(self, draft: Mapping[str, Any]) -> None:
        """Remove from the target what a client there gave: it is in the store."""
        if self._client is not None:
            self._client.spool.remove(self._client.spool.entry(draft))


def _most_at_once(cell: Cell) -> int:
    """The largest batch that the server may see: an open loop can have more in flight than it admits."""
    if cell.load.kind == "closed":
        return cell.load.concurrency
    return min(cell.load.concurrency, cell.server.max_running_requests, cell.workload.n_prompts)


def _in_words(measurement: Measurement) -> str:
    requests = measurement.requests
    text = f"{requests['completion_tokens'].sum()} tokens in {len(requests)} requests"
    return f"{text} of {measurement.planned}: {measurement.aborted}" if measurement.aborted else text
