"""One start of a run's server: start, ready, warm up, the cells one after another, and a stop in every case."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree_bench import __version__
from ddtree_bench.hosts import endpoint_now, secret_values, server_host_key
from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.load.cell import Measurement, measure
from ddtree_bench.load.cell_prompts import cell_prompts
from ddtree_bench.load.exchange import Limits
from ddtree_bench.load.prompts import Prompt, prompt_set_sha256
from ddtree_bench.load.prompts import read as read_prompts
from ddtree_bench.load.warmup import warm_up
from ddtree_bench.plan import Cell, Run
from ddtree_bench.project import Project, Report, git_commit
from ddtree_bench.records.store import REQUESTS, SERVER_LOG, SERVER_SAMPLES, Store
from ddtree_bench.server_start import Start, meet_external, start_planned
from ddtree_bench.servers import api
from ddtree_bench.servers.log_lines import cell_log, log_size
from ddtree_bench.servers.observation import Observation, difference, observe
from ddtree_bench.servers.own_words import hide
from ddtree_bench.servers.ready import LOG_LINES, ServerFailed
from ddtree_bench.targets.launcher import Launcher, TargetError
from ddtree_bench.targets.lifeline import Interruption
from ddtree_bench.targets.probe import check_unchanged
from ddtree_bench.working_folder import invocation_id

SCHEMA = 1
"""Version of the record's form."""

OBSERVE_TIMEOUT_S = 10.0

FLUSH_S = 10.0
"""How long a server may refuse to empty its prefix cache."""

SETTLE_S = 2.0
"""How long the watchdog may take to notice an end of the server that its clients have met already."""


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
        return Start(start_id, log_path.absolute())

    def _start_and_warm_up(self, cells: Sequence[Cell]) -> None:
        """Start the server, wait until it answers, warm it up; `_start` says how far that went."""
        server, project, report = self._run.server, self._project, self._report
        if server.external:
            key = server_host_key(self._host, server)
            self._start = meet_external(project, server, cells[0].workload, self._start, key, report)
        else:
            python = self._receipt["python"]
            self._start = start_planned(project, self._launcher, server, python, self._start, report)
        self._start = replace(self._start, warmup=self._warm_up(cells))

    def _warm_up(self, cells: Sequence[Cell]) -> dict[str, Any]:
        rule, begun, endpoint = cells[0].warmup, time.perf_counter(), self._start.endpoint
        warmed = warm_up(
            endpoint.base_url,
            endpoint.model,
            ((cell.workload, _most_at_once(cell), self._prompts(cell)) for cell in cells),
            read_prompts(self._project.root / rule.prompts),
            max_tokens=rule.max_tokens,
            abort=self._death,
            headers=endpoint.headers,
        )
        self._require_alive("during the warm-up")
        if errors := sorted({error for shape in warmed["shapes"] for error in shape["errors"]}):
            reason = f"the warm-up failed: {'; '.join(errors)}"
            raise self._unreachable(reason) if self._run.server.external else ServerFailed(reason, self._log_tail())
        return {"seconds": time.perf_counter() - begun, "shapes": warmed["shapes"]}

    def _flush(self) -> str | None:
        """Empty the server's prefix cache; returns why that was not done, which only an external server may say.

        Before every cell, since the cells of a run start at the head of one list of prompts. Servers refuse it while
        requests run, and those of a cell that was broken off run on for a moment.
        """
        target, external = self._project.config.targets[self._run.server.target], self._run.server.external
        if external and not target.flush_cache:
            return f"targets.{self._run.server.target}.flush_cache is not set"
        endpoint, deadline = self._start.endpoint, time.monotonic() + FLUSH_S
        while True:
            try:
                api.flush_cache(endpoint.base_url, endpoint.headers)
                return None
            except api.ApiError as error:
                self._require_alive("between two cells")
                if external and (error.not_offered or time.monotonic() > deadline):
                    return str(error)
                if time.monotonic() > deadline:
                    raise ServerFailed(f"the prefix cache was not emptied: {error}", self._log_tail()) from error
            time.sleep(0.2)

    def _measure_cell(self, cell: Cell) -> bool:
        """Measure one cell and store the attempt, failed or not; False when the server is not fit for another one."""
        begun = _now()
        measurement: Measurement | None = None
        try:
            not_flushed = self._flush()
            before, log_begin = self._observe(), log_size(self._server_log())
            measurement = self._measurement(cell)
            gone = self._require_success(measurement, f"during {cell.workload.name} at {cell.load.name}")
            after, log_end = self._observe(), log_size(self._server_log())
            if self._run.server.external and not gone:
                self._confirm_unchanged(after)
        except ServerFailed as failure:
            self._report(f"{cell.server.name}: failed: {failure.reason}")
            self._store_failure(cell, begun, failure, measurement)
            return False
        record = self._record(cell, begun, "ok", None, None) | _of_client(measurement)
        record["aborted"] = record["aborted"] or gone
        record["cache_not_flushed"] = not_flushed
        record["counters"] = {
            name: asdict(one)
            for name, one in (("before", before), ("after", after), ("difference", difference(before, after)))
        }
        record["server_log"] = cell_log(self._server_log(), log_begin, log_end)
        self._add(record, measurement)
        self._report(f"{cell.server.name}: {cell.workload.name} at {cell.load.name}: {_in_words(measurement)}")
        if gone:
            raise self._unreachable(gone)
        return True

    def _measurement(self, cell: Cell) -> Measurement:
        endpoint = self._start.endpoint
        return measure(
            endpoint.base_url,
            cell.workload,
            self._prompts(cell),
            cell.load,
            endpoint.model,
            abort=self._death,
            sample=server_samples.sampler_for(endpoint.base_url, endpoint.headers),
            limits=self._limits(cell),
            headers=endpoint.headers,
            seed=cell.arrival_seed,
        )

    def _limits(self, cell: Cell) -> Limits:
        work = self._project.config.workloads[cell.workload.name]
        return Limits(request_s=work.request_timeout_s, cell_s=work.cell_timeout_s)

    def _require_success(self, measurement: Measurement, when: str) -> str | None:
        """Raise what ended a cell without an answer; returns why one of an external endpoint is kept as broken off.

        The end of a server that was started here is a result. Of that of an endpoint nothing is known: the network may
        be down.
        """
        statuses = measurement.requests["status"]
        if not (statuses == "ok").all():
            self._wait_for_death()
        some, state = bool((statuses == "ok").any()), self._launcher.state()
        if self._run.server.external and some and not state.alive:
            return f"the server {state} {when}"
        self._require_alive(when)
        if some:
            return None
        counts = ", ".join(f"{n} x {status}" for status, n in statuses.value_counts().items())
        ended = f"; {measurement.aborted}" if measurement.aborted else ""
        reason = f"no request succeeded: {counts or 'none was sent'}{ended}"
        if self._run.server.external and (statuses.empty or (statuses == "connect_error").any()):
            raise self._unreachable(f"{reason} {when}")
        raise ServerFailed(reason, self._log_tail())

    def _confirm_unchanged(self, after: Observation) -> None:
        """Raise HostChanged when an external endpoint is no longer what it was before the cell, restarted or not."""
        now = {**self._host, "endpoint": endpoint_now(self._project, self._run.server)}
        check_unchanged(self._host, now)
        if None not in (self._start.started, after.started) and self._start.started != after.started:
            raise self._unreachable("was started again meanwhile, so the cell is not kept")

    def _unreachable(self, reason: str) -> TargetError:
        name, endpoint = self._run.server.target, self._start.endpoint
        text = hide(reason, endpoint.secrets)
        return TargetError(f"targets.{name}.url: {endpoint.base_url}: {text}; see to the endpoint, then run again")

    def _store_failure(
        self, cell: Cell, begun: str, failure: ServerFailed, measurement: Measurement | None = None
    ) -> None:
        record = self._record(cell, begun, "failed", failure.reason, failure.log_tail)
        self._add(record | ({} if measurement is None else _of_client(measurement)), measurement)

    def _add(self, record: Mapping[str, Any], measurement: Measurement | None) -> None:
        """Store an attempt, without the keys that this run knows."""
        secrets = (*self._start.endpoint.secrets, *secret_values(self._project, self._run.server.target))
        log = self._start.log_path
        shown = {**hide(record, secrets), "identity": record["identity"]}
        self._store.add(shown, lambda folder: _write_data(folder, log, measurement, secrets))

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
            "limits": asdict(self._limits(cell)),
            "start_id": start.start_id,
            "block": self._block,
            "started_at": begun,
            "ended_at": _now(),
            "ready_s": start.ready_s,
            "warmup": start.warmup,
            "host": self._host,
            "environment": self._receipt,
            "server_info": start.server_info,
            "read_back": start.read_back,
            "software": {"ddtree_bench": __version__, "commit": git_commit(self._project.root)},
        }

    def _prompts(self, cell: Cell) -> tuple[Prompt, ...]:
        work = cell.workload
        spec = self._project.config.workloads[work.name]
        prompts = read_prompts(self._project.root / spec.prompts)
        chosen = cell_prompts(spec, prompts, cell.load.concurrency, cell.load.rate)
        if prompt_set_sha256(chosen) != work.prompts_sha256:
            raise TargetError(
                f"{spec.prompts}: has been changed since this pass began, so its prompts are not those of {cell.view}; "
                "start the workflow again"
            )
        return chosen

    def _observe(self) -> Observation:
        """What the server counts now, and why it does not say the rest."""
        endpoint = self._start.endpoint
        return observe(endpoint.base_url, timeout_s=OBSERVE_TIMEOUT_S, headers=endpoint.headers)

    def _server_log(self) -> Path | None:
        """The log of a server that was started here."""
        return None if self._run.server.external else self._start.log_path

    def _log_tail(self) -> str:
        return self._launcher.log_tail(LOG_LINES)

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
        raise ServerFailed(reason, self._log_tail())


def _write_data(folder: Path, log_path: Path, measurement: Measurement | None, secrets: Sequence[str]) -> None:
    log = log_path.read_bytes() if log_path.exists() else b""
    (folder / SERVER_LOG).write_bytes(hide(log, secrets))
    if measurement is not None:
        errors = [hide(error, secrets) for error in measurement.requests["error"]]
        requests_table.write(measurement.requests.assign(error=errors), folder / REQUESTS)
        measurement.server_samples.to_parquet(folder / SERVER_SAMPLES, index=False)


def _most_at_once(cell: Cell) -> int:
    """The largest batch that the server may see: an open loop can have more in flight than it admits."""
    if cell.load.kind == "closed":
        return cell.load.concurrency
    return min(cell.load.concurrency, cell.server.max_running_requests, cell.workload.n_prompts)


def _of_client(measurement: Measurement) -> dict[str, Any]:
    statuses = {str(status): int(n) for status, n in measurement.requests["status"].value_counts().items()}
    return {
        "client": measurement.client,
        "planned": measurement.planned,
        "request_statuses": statuses,
        "aborted": measurement.aborted,
    }


def _in_words(measurement: Measurement) -> str:
    requests = measurement.requests
    text = f"{requests['completion_tokens'].sum()} tokens in {len(requests)} requests"
    return f"{text} of {measurement.planned}: {measurement.aborted}" if measurement.aborted else text


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
