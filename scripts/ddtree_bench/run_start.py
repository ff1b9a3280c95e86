"""One start of a run's server: start, ready, warm up, the cells one after another, and a stop in every case."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree_bench import __version__
from ddtree_bench.config.models import Target
from ddtree_bench.hosts import server_host_key
from ddtree_bench.load import requests_table
from ddtree_bench.load.closed_loop import Measurement, measure
from ddtree_bench.load.prompts import Prompt, prompt_set_sha256, select
from ddtree_bench.load.prompts import read as read_prompts
from ddtree_bench.load.warmup import warm_up
from ddtree_bench.plan import Cell, Run, Server
from ddtree_bench.project import Project, Report, git_commit
from ddtree_bench.records.store import REQUESTS, SERVER_LOG, SERVER_SAMPLES, Store
from ddtree_bench.servers import api
from ddtree_bench.servers.command_line import Place, served_model_name
from ddtree_bench.servers.ready import LOG_LINES, ServerFailed
from ddtree_bench.servers.start import start_server
from ddtree_bench.targets.launcher import Launcher, TargetError
from ddtree_bench.targets.lifeline import Interruption
from ddtree_bench.working_folder import invocation_id

SCHEMA = 1
"""Version of the record's form."""

SETTLE_S = 2.0
"""How long the watchdog may take to notice an end of the server that its clients have met already."""


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


def passed_environment(target: Target) -> dict[str, str]:
    """Return the variables of this process's environment that a target's servers get; their values stay unrecorded."""
    return {name: os.environ[name] for name in target.pass_env if name in os.environ}


class RunStart:
    """One start of a run's server and the cells measured on it; `measure` may be called once."""

    def __init__(
        self,
        project: Project,
        run: Run,
        store: Store,
        launcher: Launcher,
        host: Mapping[str, Any],
        receipt: Mapping[str, Any],
        report: Report,
    ) -> None:
        self._project = project
        self._run = run
        self._receipt = receipt
        self._target = project.config.targets[run.server.target]
        self._store = store
        self._launcher = launcher
        self._host = host
        self._report = report
        self._block = f"{invocation_id()}-r{run.repeat}"
        self._start = self._new_start()

    def measure(self, cells: Sequence[Cell], interruption: Interruption, starts_left: int) -> list[Cell]:
        """Measure cells until all are done or the server fails; returns those that are left for another start.

        When `starts_left` is 0, or the server never became fit to be measured, what is left is stored as failed.
        """
        begun = _now()
        pending = list(cells)
        failure = ServerFailed("the server failed in earlier cells of this run, too often to start it again", "")
        try:
            self._start_and_warm_up(cells)
            while pending and self._measure_cell(pending.pop(0)):
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
                self._store_failure(cell, begun, failure)
            return []
        return pending

    def _new_start(self) -> Start:
        start_id = uuid.uuid4().hex[:12]
        name = f"{self._run.server.name}-r{self._run.repeat}-{start_id}.log"
        log_path = self._project.folders.results / "logs" / "servers" / self._run.server.target / name
        return Start(start_id, "", log_path.absolute())

    def _start_and_warm_up(self, cells: Sequence[Cell]) -> None:
        """Start the server, wait until it answers, warm it up; `_start` says how far that went."""
        server, start = self._run.server, self._start
        place = server_place(self._project, self._launcher, server, self._receipt["python"], start.start_id)
        ready = start_server(
            self._launcher,
            server,
            place,
            log_path=start.log_path,
            stop_grace_s=self._target.stop_grace_s,
            timeout_s=self._target.start_timeout_s,
            progress=self._report,
            env=passed_environment(self._target),
        )
        base_url = self._launcher.base_url()
        self._start = replace(start, base_url=base_url, ready_s=ready.seconds, server_info=ready.server_info)
        self._start = replace(self._start, warmup=self._warm_up(cells))

    def _warm_up(self, cells: Sequence[Cell]) -> dict[str, Any]:
        rule, begun = cells[0].warmup, time.perf_counter()
        warmed = warm_up(
            self._start.base_url,
            served_model_name(self._run.server),
            ((cell.workload, cell.load.concurrency, self._prompts(cell)) for cell in cells),
            read_prompts(self._project.root / rule.prompts),
            max_tokens=rule.max_tokens,
            abort=self._death,
        )
        self._require_alive("during the warm-up")
        if errors := sorted({error for shape in warmed["shapes"] for error in shape["errors"]}):
            raise ServerFailed(f"the warm-up failed: {'; '.join(errors)}", self._launcher.log_tail(LOG_LINES))
        self._call(api.flush_cache)
        return {"seconds": time.perf_counter() - begun, "shapes": warmed["shapes"]}

    def _measure_cell(self, cell: Cell) -> bool:
        """Measure one cell and store the attempt, failed or not; False when the server is not fit for another one."""
        begun = _now()
        measurement: Measurement | None = None
        try:
            before = self._call(api.counters)
            measurement = measure(
                self._start.base_url,
                cell.workload,
                self._prompts(cell),
                cell.load.concurrency,
                served_model_name(cell.server),
                abort=self._death,
                sample=lambda: api.counters(self._start.base_url),
            )
            self._require_success(measurement, f"during {cell.workload.name} at {cell.load.name}")
            after = self._call(api.counters)
        except ServerFailed as failure:
            self._report(f"{cell.server.name}: failed: {failure.reason}")
            self._store_failure(cell, begun, failure, measurement)
            return False
        extra = {"counters": {"before": before, "after": after}, "client": measurement.client}
        record = self._record(cell, begun, "ok", None, None) | extra
        self._store.add(record, lambda folder: _write_data(folder, self._start.log_path, measurement))
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
        self, cell: Cell, begun: str, failure: ServerFailed, measurement: Measurement | None = None
    ) -> None:
        record = self._record(cell, begun, "failed", failure.reason, failure.log_tail)
        self._store.add(record, lambda folder: _write_data(folder, self._start.log_path, measurement))

    def _record(self, cell: Cell, begun: str, status: str, reason: str | None, log_tail: str | None) -> dict[str, Any]:
        start = self._start
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
            "software": {"ddtree_bench": __version__, "commit": git_commit(self._project.root)},
        }

    def _prompts(self, cell: Cell) -> tuple[Prompt, ...]:
        work = cell.workload
        spec = self._project.config.workloads[work.name]
        prompts = read_prompts(self._project.root / spec.prompts)
        chosen = select(prompts, spec.blocks, spec.n_min, cell.load.concurrency, spec.repeat_prompts)
        if prompt_set_sha256(chosen) != work.prompts_sha256:
            raise TargetError(
                f"{spec.prompts}: has been changed since this pass began, so its prompts are not those of {cell.view}; "
                "start the workflow again"
            )
        return chosen

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

    def _call(self, call: Callable[[str], Any]) -> Any:
        try:
            return call(self._start.base_url)
        except api.ApiError as error:
            self._wait_for_death()
            self._require_alive("between two cells")
            raise ServerFailed(f"the server does not answer: {error}", self._launcher.log_tail(LOG_LINES)) from error


def _write_data(folder: Path, log_path: Path, measurement: Measurement | None) -> None:
    log = log_path.read_bytes() if log_path.exists() else b""
    (folder / SERVER_LOG).write_bytes(log)
    if measurement is not None:
        requests_table.write(measurement.requests, folder / REQUESTS)
        measurement.server_samples.to_parquet(folder / SERVER_SAMPLES, index=False)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
