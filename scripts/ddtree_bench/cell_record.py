"""The record of a cell: what is known before it is measured, what was measured, and both in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddtree_bench import __version__
from ddtree_bench.hosts import server_host_key
from ddtree_bench.load.observed import now
from ddtree_bench.load.outcome import CellOutcome, write_tables
from ddtree_bench.metrics.percentiles import nearest_rank
from ddtree_bench.plan import Cell, Run
from ddtree_bench.project import Project, git_commit
from ddtree_bench.records.store import SERVER_LOG, Attempt, Store
from ddtree_bench.running_server import CellFailed, limits_of
from ddtree_bench.server_start import Start, secret_values
from ddtree_bench.servers.observation import difference
from ddtree_bench.servers.own_words import hide
from ddtree_bench.servers.ready import ServerFailed
from ddtree_bench.targets.launcher import LinkRecord
from ddtree_bench.working_folder import invocation_id

SCHEMA = 1
"""Version of the record's form."""


class CellRecords:
    """The records of one run's cells, on a host under a receipt, and the store that they go to."""

    def __init__(
        self, project: Project, run: Run, store: Store, host: Mapping[str, Any], receipt: Mapping[str, Any]
    ) -> None:
        self._project = project
        self._store = store
        self._host = host
        self._receipt = receipt
        self._secrets = secret_values(project, run.server.target)
        self._block = f"{invocation_id()}-r{run.repeat}"

    def draft(self, cell: Cell, start: Start) -> dict[str, Any]:
        """What the record of a cell says before it is measured, without the keys that this run knows."""
        record = {
            "schema": SCHEMA,
            "plan_key": cell.key,
            "host_key": server_host_key(self._host, cell.server),
            "identity": cell.identity,
            "labels": cell.labels,
            "limits": asdict(limits_of(self._project, cell)),
            "client_place": cell.server.client or "here",
            "start_id": start.start_id,
            "block": self._block,
            "ready_s": start.ready_s,
            "warmup": start.warmup,
            "host": self._host,
            "environment": self._receipt,
            "server_info": start.server_info,
            "read_back": start.read_back,
            "software": {"ddtree_bench": __version__, "commit": git_commit(self._project.root)},
        }
        return _hidden(record, self._secrets)

    def add_measured(self, draft: Mapping[str, Any], outcome: CellOutcome) -> Attempt:
        """Store a cell that was measured; `draft` is what was known of it before."""
        return store_measured(self._store, draft, outcome, self._secrets)

    def add_failed(self, draft: Mapping[str, Any], begun: str, failure: ServerFailed, log: Path | None) -> Attempt:
        """Store a cell that the server under test has failed, with what was measured of it and the server's log."""
        outcome = failure.outcome if isinstance(failure, CellFailed) else None
        record = {
            **draft,
            "status": "failed",
            "reason": failure.reason,
            "log_tail": failure.log_tail,
            "started_at": begun,
            "ended_at": now(),
            **({} if outcome is None else _of_outcome(outcome)),
        }
        written = log.read_bytes() if log is not None and log.exists() else b""
        return _add(self._store, record, written, outcome, self._secrets)


def store_measured(store: Store, draft: Mapping[str, Any], outcome: CellOutcome, secrets: Sequence[str]) -> Attempt:
    """Store a cell that was measured, its record completed from its draft, without the keys that are given."""
    before, after = outcome.before, outcome.after
    counters = (("before", before), ("after", after), ("difference", difference(before, after)))
    record = {
        **draft,
        "status": "ok",
        "reason": None,
        "log_tail": None,
        "started_at": outcome.started_at,
        "ended_at": outcome.ended_at,
        **_of_outcome(outcome),
        "cache_not_flushed": outcome.cache_not_flushed,
        "counters": {name: asdict(one) for name, one in counters},
        "server_log": outcome.server_log,
    }
    return _add(store, record, outcome.log, outcome, secrets)


def _add(
    store: Store, record: Mapping[str, Any], log: bytes, outcome: CellOutcome | None, secrets: Sequence[str]
) -> Attempt:
    def write_data(folder: Path) -> None:
        (folder / SERVER_LOG).write_bytes(hide(log, secrets))
        if outcome is not None:
            requests = outcome.measurement.requests
            errors = [hide(error, secrets) for error in requests["error"]]
            told = replace(outcome.measurement, requests=requests.assign(error=errors))
            write_tables(replace(outcome, measurement=told), folder)

    return store.add(_hidden(record, secrets), write_data)


def _hidden(record: Mapping[str, Any], secrets: Sequence[str]) -> dict[str, Any]:
    """The record without keys, but for the identity, which its folder is named after."""
    return {**hide(record, secrets), "identity": record["identity"]}


def _of_outcome(outcome: CellOutcome) -> dict[str, Any]:
    """What the record says of a measurement, whether the cell failed or not."""
    measurement = outcome.measurement
    statuses = {str(status): int(n) for status, n in measurement.requests["status"].value_counts().items()}
    return {
        "client": measurement.client,
        "planned": measurement.planned,
        "request_statuses": statuses,
        "aborted": measurement.aborted or outcome.server_ended,
        **({} if outcome.telemetry is None else {"telemetry": outcome.telemetry}),
        **_of_link(outcome.link),
        **({} if outcome.spooled is None else {"spooled": outcome.spooled}),
    }


def _of_link(link: LinkRecord) -> dict[str, Any]:
    """What the record says of the link that the requests went through; nothing where there was none."""
    trips = link.round_trips_s
    if not trips:
        return {}
    told = {"median": nearest_rank(trips, 50), "p90": nearest_rank(trips, 90), "max": max(trips), "n": len(trips)}
    return {"link": {"round_trip_s": told}}
