"""The server of one start as its cells see it: where it is, whether it lives, and whose fault it is if it does not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

from ddtree_bench.external_endpoint import endpoint_now
from ddtree_bench.load.cell_prompts import cell_prompts
from ddtree_bench.load.cell_work import CellWork
from ddtree_bench.load.exchange import Limits
from ddtree_bench.load.outcome import CellOutcome
from ddtree_bench.load.prompts import Prompt, prompt_set_sha256
from ddtree_bench.load.prompts import read as read_prompts
from ddtree_bench.load.telemetry import Telemetry, program
from ddtree_bench.plan import Cell, Server
from ddtree_bench.project import Project, Report
from ddtree_bench.server_start import Start
from ddtree_bench.servers import api
from ddtree_bench.servers.endpoint import Endpoint
from ddtree_bench.servers.observation import Observation
from ddtree_bench.servers.own_words import hide
from ddtree_bench.servers.ready import LOG_LINES, ServerFailed, see_again
from ddtree_bench.targets.launcher import (
    LINK_LOST,
    Launcher,
    LinkRecord,
    ServerState,
    TargetError,
    TargetLost,
    ended_by_others,
)
from ddtree_bench.targets.probe import check_unchanged

FLUSH_S = 10.0
"""How long a server may refuse to empty its prefix cache."""

FOUND_AGAIN_S = 60.0
"""How long a server may take to answer once the link to it is back."""

NOTICED_S = 10.0
"""How long the launcher may take to notice an end of the server that a client has met."""

UNREACHED = "the link to the target is lost"

POLL_S = 0.2


class CellFailed(ServerFailed):
    """A cell that the server under test failed, with what was measured of it."""

    def __init__(self, failure: ServerFailed, outcome: CellOutcome) -> None:
        super().__init__(failure.reason, failure.log_tail)
        self.outcome = outcome


class RunningServer:
    """A server that was started, or met, and has been ready."""

    def __init__(
        self,
        project: Project,
        server: Server,
        launcher: Launcher,
        host: Mapping[str, Any],
        receipt: Mapping[str, Any],
        start: Start,
        report: Report,
    ) -> None:
        self._project = project
        self._server = server
        self._launcher = launcher
        self._host = host
        self._receipt = receipt
        self._start = start
        self._report = report
        self._link_lost = False
        self.endpoint: Endpoint = start.endpoint

    def work(self, cell: Cell) -> CellWork:
        """What a client on this machine is asked to measure for a cell."""
        return CellWork(
            base_url=self.endpoint.base_url,
            model=self.endpoint.model,
            workload=cell.workload,
            load=cell.load,
            prompts=prompts_of(self._project, cell),
            limits=limits_of(self._project, cell),
            seed=cell.arrival_seed,
            headers=self.endpoint.headers,
        )

    def ended(self) -> str | None:
        """How the server ended, or that the link to it is lost; None while it runs within reach."""
        state = self._state()
        if state.reason == LINK_LOST:
            return UNREACHED
        return None if state.alive else str(state)

    @contextmanager
    def watched_link(self) -> Iterator[Callable[[], LinkRecord]]:
        """Watch the link as the launcher does; it is broken too when the server was out of reach for a moment."""
        self._link_lost = False
        with self._launcher.watched_link() as link:

            def record() -> LinkRecord:
                told = link()
                return replace(told, broken=told.broken or (UNREACHED if self._link_lost else None))

            yield record

    def telemetry(self) -> AbstractContextManager[Telemetry | None]:
        """What watches the server's machine while it is entered; nothing watches that of an external endpoint."""
        if self._server.external:
            return nullcontext()
        # The energy counter takes nvidia-ml-py, which this Python has; elsewhere only the server's may have it.
        python = sys.executable if self._launcher.shares_files else self._receipt["python"]
        command = program(python, self._launcher.tools())
        return Telemetry(self._launcher.open_stream, command, self._launcher.clock_offset_s())

    def known_state(self) -> ServerState:
        """What the server is doing, once the target can be asked. Raises TargetError when it cannot for too long."""
        patience_s = self._project.config.targets[self._server.target].reconnect_s
        deadline = time.monotonic() + patience_s
        while (state := self._launcher.state()).reason == LINK_LOST:
            if time.monotonic() > deadline:
                raise TargetError(
                    f"targets.{self._server.target}: for {patience_s:g} s nothing was told of the server "
                    f"{self._server.name}; see to the host and its service manager, then run again"
                )
            time.sleep(POLL_S)
        return state

    def require_alive(self, when: str) -> None:
        """Raise ServerFailed when the server has ended by itself, TargetError when others ended it."""
        state = self._state()
        if state.alive:
            return
        reason = f"the server {state} {when}"
        if not state.ended_by_itself:
            raise ended_by_others(state, f"{self._server.name}: {reason}")
        raise self.failed(reason)

    def failed(self, reason: str) -> ServerFailed:
        """The failure of the server, with the end of its log."""
        return ServerFailed(reason, self._launcher.log_tail(LOG_LINES))

    def unreachable(self, reason: str) -> TargetError:
        """The error of an external endpoint, with its name and without its key."""
        text = hide(reason, self.endpoint.secrets)
        return TargetError(
            f"targets.{self._server.target}.url: {self.endpoint.base_url}: {text}; see to the endpoint, then run again"
        )

    def flush(self, patience_s: float | None = None) -> str | None:
        """Empty the server's prefix cache; returns why that was not done, which only an external server may say.

        Before every cell, since the cells of a run start at the head of one list of prompts. Servers refuse it while
        requests run, and those of a cell that was broken off run on for a moment: up to `patience_s`, FLUSH_S if None.
        """
        target, external = self._project.config.targets[self._server.target], self._server.external
        if external and not target.flush_cache:
            return f"targets.{self._server.target}.flush_cache is not set"
        deadline = time.monotonic() + (FLUSH_S if patience_s is None else patience_s)
        while True:
            try:
                api.flush_cache(self.endpoint.base_url, self.endpoint.headers)
                return None
            except api.ApiError as error:
                self.require_alive("between two cells")
                if external and (error.not_offered or time.monotonic() > deadline):
                    return str(error)
                if time.monotonic() > deadline:
                    raise self.failed(f"the prefix cache was not emptied: {error}") from error
            time.sleep(POLL_S)

    def judged(self, outcome: CellOutcome, cell: str) -> CellOutcome:
        """Return the outcome of a cell that is one; `server_ended` is why one of an external endpoint was broken off.

        A server that ends after its client had done is of the next cell.

        Raises CellFailed when the server under test failed it, TargetError when others did, and HostChanged when an
        external endpoint is not the one it was.
        """
        try:
            gone = self._require_success(outcome, f"during {cell}")
        except ServerFailed as failure:
            raise CellFailed(failure, outcome) from failure
        if self._server.external and not gone:
            self._confirm_unchanged(outcome.after)
        return replace(outcome, server_ended=gone)

    def find_again(self) -> None:
        """See, after the link was cut, that the server is the one it was and has ended what it was asked before.

        Raises TargetError when it has ended, for whatever reason: the cut itself may have been that.
        """
        state = self.known_state()
        if not state.alive:
            raise TargetLost(f"{self._server.name}: the server {state} while the link to it was cut; run again")
        self.endpoint = replace(self.endpoint, base_url=self._launcher.base_url())
        see_again(
            self.endpoint.base_url,
            self._server,
            self._start.start_id,
            state=self._launcher.state,
            log_path=self._start.log_path,
            timeout_s=FOUND_AGAIN_S,
        )
        try:
            # Answers that nobody reads any more can take as long as any answer may.
            self.flush(max(work.request_timeout_s for work in self._project.config.workloads.values()))
        except ServerFailed as failure:
            raise TargetLost(f"{self._server.name}: {failure.reason} after the link was cut; run again") from failure

    def _require_success(self, outcome: CellOutcome, when: str) -> str | None:
        """Raise what ended a cell without an answer; returns why one of an external endpoint is kept as broken off.

        The end of a server that was started here is a result. Of that of an endpoint nothing is known: the network may
        be down.
        """
        measurement, ended = outcome.measurement, outcome.server_ended
        statuses = measurement.requests["status"]
        some = bool((statuses == "ok").any())
        # Behind a lost link nothing is known of the server, and nothing of the cell is kept.
        if ended is not None and ended != UNREACHED:
            if self._server.external and some:
                return f"the server {ended} {when}"
            self._raise_end(ended, when)
        if some:
            return None
        self.require_alive(when)
        counts = ", ".join(f"{n} x {status}" for status, n in statuses.value_counts().items())
        ended = f"; {measurement.aborted}" if measurement.aborted else ""
        reason = f"no request succeeded: {counts or 'none was sent'}{ended}"
        if self._server.external and (statuses.empty or (statuses == "connect_error").any()):
            raise self.unreachable(f"{reason} {when}")
        raise self.failed(reason)

    def _raise_end(self, ended: str, when: str) -> NoReturn:
        """Raise what an end of the server is that its client has met, once the launcher has noticed it too."""
        deadline = time.monotonic() + NOTICED_S
        while self.known_state().alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.require_alive(when)
        raise TargetError(
            f"{self._server.name}: the client says that the server {ended} {when}, but it runs; the cell is not kept, "
            "run again"
        )

    def _state(self) -> ServerState:
        state = self._launcher.state()
        self._link_lost = self._link_lost or state.reason == LINK_LOST
        return state

    def _confirm_unchanged(self, after: Observation) -> None:
        """Raise HostChanged when an external endpoint is no longer what it was before the cell, restarted or not."""
        now = {**self._host, "endpoint": endpoint_now(self._project, self._server)}
        check_unchanged(self._host, now)
        if None not in (self._start.started, after.started) and self._start.started != after.started:
            raise self.unreachable("was started again meanwhile, so the cell is not kept")


def limits_of(project: Project, cell: Cell) -> Limits:
    """Return the limits of time that a cell's requests have."""
    spec = project.config.workloads[cell.workload.name]
    return Limits(request_s=spec.request_timeout_s, cell_s=spec.cell_timeout_s)


def prompts_of(project: Project, cell: Cell) -> tuple[Prompt, ...]:
    """Return a cell's prompts. Raises TargetError when their file is not what it was when the cell was planned."""
    spec = project.config.workloads[cell.workload.name]
    prompts = read_prompts(project.root / spec.prompts)
    chosen = cell_prompts(spec, prompts, cell.load.concurrency, cell.load.rate)
    if prompt_set_sha256(chosen) != cell.workload.prompts_sha256:
        raise TargetError(
            f"{spec.prompts}: has been changed since this pass began, so its prompts are not those of {cell.view}; "
            "start the workflow again"
        )
    return chosen
