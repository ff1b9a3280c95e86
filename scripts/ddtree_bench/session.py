"""One start of a run's server: start, ready, warm up, the cells one after another, and a stop in every case."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree_bench import __version__
from ddtree_bench.hosts import read_json, server_host_key
from ddtree_bench.load import requests_table
from ddtree_bench.load.closed_loop import Measurement, measure
from ddtree_bench.load.prompts import Prompt, select
from ddtree_bench.load.prompts import read as read_prompts
from ddtree_bench.load.warmup import warm_up
from ddtree_bench.plan import Cell, Run, Server
from ddtree_bench.project import Project, invocation_id
from ddtree_bench.records.store import REQUESTS, SERVER_LOG, Store
from ddtree_bench.servers import api
from ddtree_bench.servers.commands import Place, served_model_name
from ddtree_bench.servers.ready import LOG_LINES, ServerFailed
from ddtree_bench.servers.start import start_server
from ddtree_bench.targets.launcher import Launcher, TargetError
from ddtree_bench.targets.lifeline import Interruption

SCHEMA = 1
"""Version of the record's form."""

SETTLE_S = 2.0
"""How long the watchdog may take to notice an end of the server that its clients have met already."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """One start of the server: its name, when it became ready, and what it said and cost until then."""

    start_id: str
    base_url: str
    log_path: Path
    ready_s: float | None = None
    server_info: Mapping[str, Any] | None = None
    warmup: Mapping[str, Any] | None = None


def server_place(
    project: Project, launcher: Launcher, server: Server, python: str, start_id: str, port: int = 0
) -> Place:
    """Return where and as what a server is started; `port` 0 is the target's own or else a free one."""
    target = project.config.targets[server.target]
    port = port or target.port or launcher.free_port()
    return Place(python=python, port=port, start_id=start_id, host=target.host, **project.model_paths(server))


class Session:
    """One start of a run's server and the cells measured on it; `measure` may be called once."""

    def __init__(
        self,
        project: Project,
        run: Run,
        store: Store,
        launcher: Launcher,
        host: Mapping[str, Any],
        report: Report,
    ) -> None:
        self._project = project
        self._run = run
        self._receipt = read_json(project.receipt(run.server.target, run.server.engine))
        self._target = project.config.targets[run.server.target]
        self._store = store
        self._launcher = launcher
        self._host = host
        self._report = report
        self._block = f"{invocation_id()}-r{run.repeat}"

    def measure(self, cells: Sequence[Cell], interruption: Interruption, is_last: bool) -> list[Cell]:
        """Measure cells until all are done or the server fails; returns those that are left for another start.

        With `is_last` no start follows, and what a failure leaves is stored as failed too.
        """
        start = self._new_start()
        begun = _now()
        pending = list(cells)
        try:
            start = self._start_and_warm_up(start, cells)
            while pending and self._measure_cell(start, pending.pop(0)):
                continue
            failure = ServerFailed("the server failed in an earlier cell of this run, too often to start it again", "")
        except ServerFailed as error:
            # A server that does not even start would not do so for the next cell either.
            failure, is_last = error, True
            self._report(f"{self._run.server.name}: failed: {failure.reason}")
        finally:
            with interruption.shielded():
                self._launcher.stop()
        if is_last:
            for cell in pending:
                self._store_failure(start, cell, begun, failure)
            return []
        return pending

    def _new_start(self) -> Start:
        start_id = uuid.uuid4().hex[:12]
        name = f"{self._run.server.name}-r{self._run.repeat}-{start_id}.log"
        log_path = self._project.places.results / "logs" / "servers" / self._run.server.target / name
        return Start(start_id, "", log_path.absolute())

    def _start_and_warm_up(self, start: Start, cells: Sequence[Cell]) -> Start:
        server = self._run.server
        place = server_place(self._project, self._launcher, server, self._receipt["python"], start.start_id)
        ready = start_server(
            self._launcher,
            server,
            place,
            log_path=start.log_path,
            stop_grace_s=self._target.stop_grace_s,
            timeout_s=self._target.start_timeout_s,
            progress=self._report,
        )
        start = replace(start, base_url=self._launcher.base_url(), ready_s=ready.seconds, server_info=ready.server_info)
        return replace(start, warmup=self._warm_up(start, cells))

    def _warm_up(self, start: Start, cells: Sequence[Cell]) -> dict[str, Any]:
        rule, begun = cells[0].warmup, time.perf_counter()
        warmed = warm_up(
            start.base_url,
            served_model_name(self._run.server),
            ((cell.workload, cell.load.concurrency, self._prompts(cell)) for cell in cells),
            read_prompts(self._project.root / rule.prompts),
            max_tokens=rule.max_tokens,
            abort=self._death,
        )
        self._require_alive("during the warm-up")
        if errors := sorted({error for shape in warmed["shapes"] for error in shape["errors"]}):
            raise ServerFailed(f"the warm-up failed: {'; '.join(errors)}", self._launcher.log_tail(LOG_LINES))
        self._call(api.flush_cache, start)
        return {"seconds": time.perf_counter() - begun, "shapes": warmed["shapes"]}

    def _measure_cell(self, start: Start, cell: Cell) -> bool:
        """Measure one cell and store the attempt, failed or not; False when the server is not fit for another one."""
        begun = _now()
        measurement: Measurement | None = None
        try:
            before = self._call(api.counters, start)
            measurement = measure(
                start.base_url,
                cell.workload,
                self._prompts(cell),
                cell.load.concurrency,
                served_model_name(cell.server),
                abort=self._death,
            )
            self._require_success(measurement, f"during {cell.workload.name} at {cell.load.name}")
            after = self._call(api.counters, start)
        except ServerFailed as failure:
            self._report(f"{cell.server.name}: failed: {failure.reason}")
            self._store_failure(start, cell, begun, failure, measurement)
            return False
        extra = {"counters": {"before": before, "after": after}, "client": measurement.client}
        record = self._record(start, cell, begun, "ok", None, None) | extra
        self._store.add(record, lambda folder: _write_data(folder, start.log_path, measurement))
        tokens = measurement.requests["completion_tokens"].sum()
        self._report(
            f"{cell.server.name}: {cell.workload.name} at {cell.load.name}: "
            f"{tokens} tokens in {len(measurement.requests)} requests"
        )
        return True

    def _require_success(self, measurement: Measurement, when: str) -> None:
        statuses = measurement.requests["status"]
        if not (statuses == "ok").all():
            self._wait_for_death()
        self._require_alive(when)
        if not (statuses == "ok").any():
            counts = ", ".join(f"{n} x {status}" for status, n in statuses.value_counts().items())
            raise ServerFailed(f"no request succeeded: {counts}", self._launcher.log_tail(LOG_LINES))

    def _store_failure(
        self, start: Start, cell: Cell, begun: str, failure: ServerFailed, measurement: Measurement | None = None
    ) -> None:
        record = self._record(start, cell, begun, "failed", failure.reason, failure.log_tail)
        self._store.add(record, lambda folder: _write_data(folder, start.log_path, measurement))

    def _record(
        self, start: Start, cell: Cell, begun: str, status: str, reason: str | None, log_tail: str | None
    ) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "plan_key": cell.key,
            "host_key": server_host_key(self._host, cell.server),
            "status": status,
            "reason": reason,
            "log_tail": log_tail,
            "identity": cell.identity,
            "labels": cell.labels,
            "start_id": start.start_id,
            "block": self._block,
            "started_at": begun,
            "ended_at": _now(),
            "ready_s": start.ready_s,
            "warmup": start.warmup,
            "host": self._host,
            "environment": self._receipt,
            "server_info": start.server_info,
            "software": {"ddtree_bench": __version__},
        }

    def _prompts(self, cell: Cell) -> tuple[Prompt, ...]:
        work = cell.workload
        spec = self._project.config.workloads[work.name]
        prompts = read_prompts(self._project.root / spec.prompts)
        return select(prompts, spec.blocks, spec.n_min, cell.load.concurrency, spec.repeat_prompts)

    def _death(self) -> str | None:
        """Return how the server ended, or None while it runs."""
        state = self._launcher.state()
        return None if state.alive else str(state)

    def _wait_for_death(self) -> None:
        """Wait until the watchdog has noticed an end of the server, if there is one to notice."""
        deadline = time.monotonic() + SETTLE_S
        while self._launcher.state().alive and time.monotonic() < deadline:
            time.sleep(0.1)

    def _require_alive(self, when: str) -> None:
        state = self._launcher.state()
        if state.alive:
            return
        reason = f"the server {state} {when}"
        if not state.ended_by_itself:
            raise TargetError(f"{self._run.server.name}: {reason}")
        raise ServerFailed(reason, self._launcher.log_tail(LOG_LINES))

    def _call(self, call: Callable[[str], Any], start: Start) -> Any:
        try:
            return call(start.base_url)
        except api.ApiError as error:
            self._wait_for_death()
            self._require_alive("between two cells")
            raise ServerFailed(f"the server does not answer: {error}", self._launcher.log_tail(LOG_LINES)) from error


def _write_data(folder: Path, log_path: Path, measurement: Measurement | None) -> None:
    log = log_path.read_bytes() if log_path.exists() else b""
    (folder / SERVER_LOG).write_bytes(log)
    if measurement is not None:
        requests_table.write(measurement.requests, folder / REQUESTS)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
