"""What of a record and its raw data becomes rows of the tables `cells`, `runs`, `acceptance` and `requests`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from ddtree_bench import columns, keys, metrics
from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.load.tokenizer import Tokenizer
from ddtree_bench.metrics import Slos
from ddtree_bench.metrics.checks import Check, Checked, checks
from ddtree_bench.metrics.client_health import health
from ddtree_bench.metrics.parsed import Request
from ddtree_bench.metrics.recount import recounted
from ddtree_bench.plan import EXTERNAL, Load
from ddtree_bench.record_status import Status, reason_of, status_of
from ddtree_bench.records.store import REQUESTS, SERVER_SAMPLES
from ddtree_bench.targets.probe import host_key, recorded_name


@dataclass(frozen=True)
class Counting:
    """The tokenizer that counts a model's answers, and the digest of its file (64 hex digits)."""

    tokenizer: Tokenizer
    sha256: str


CLIENT_HEALTHY = "client_healthy"
"""The column, and the name of the check."""


def _server_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    server = record["identity"]["server"]
    drafter = server["drafter"] or {}
    return {
        "server": record["labels"]["server"],
        **{
            name: server[name]
            for name in columns.SERVER
            if name in server and name not in ("model", "drafter", "flags")
        },
        "model": server["model"]["name"],
        "model_revision": server["model"]["revision"],
        "drafter": drafter.get("name"),
        "drafter_revision": drafter.get("revision"),
        "verify_width": _verify_width(server),
        "flags": keys.canonical(server["flags"]),
        "host_key": record["host_key"],
        "machine_key": host_key(record["host"], recorded_name(**server["model"]), None),
    }


def _verify_width(server: Mapping[str, Any]) -> int:
    if server["method"] == "DDTREE":
        return int(server["budget"]) + 1
    return int(server["block_size"]) if server["method"] == "DFLASH" else 1


def _cell_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    identity, labels = record["identity"], record["labels"]
    work = {name: identity["workload"][name] for name in columns.WORK if name in identity["workload"]}
    return {
        **_server_columns(record),
        **work,
        "warmup": keys.short(keys.digest(identity["warmup"])),
        "protocol": identity["protocol"],
        "workload": labels["workload"],
        "load": labels["load"],
        **_load_columns(_load(identity["load"])),
        "repeat": identity["repeat"],
        "commit": (record.get("software") or {}).get("commit"),
        "not_confirmed": _not_confirmed(record),
        **_read_back(record),
        **_server_counts(record),
        "link_round_trip_p50_s": _round_trip(record).get("median"),
        "link_round_trip_max_s": _round_trip(record).get("max"),
    }


def _not_confirmed(record: Mapping[str, Any]) -> str | None:
    return " ".join((record.get("read_back") or {}).get("not_confirmed", ())) or None


def _load_columns(load: Load) -> dict[str, Any]:
    return {
        "load_kind": load.kind,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "arrivals": load.arrivals,
    }


def _read_back(record: Mapping[str, Any]) -> dict[str, Any]:
    info = record.get("server_info") or {}
    return {name: info.get("version" if name == "engine_version" else name) for name in columns.READ_BACK}


def _round_trip(record: Mapping[str, Any]) -> Mapping[str, float]:
    """The round trips of the link that a cell's requests went through; empty where there was none."""
    return (record.get("link") or {}).get("round_trip_s", {})


def _server_counts(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the server counted over the cell; None where the engine has no such counter."""
    values, _ = counted(record)
    names = {"server_generation_tokens": "generation_tokens_total", "server_verify_calls": "verify_calls_total"}
    return {column: values.get(name) for column, name in names.items()}


def counted(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the differences of the server's counters over the cell by name, and why others are not known."""
    counters = record.get("counters") or {}
    if "difference" in counters:
        return counters["difference"]["values"], counters["difference"]["missing"]
    before, after = counters.get("before") or {}, counters.get("after") or {}
    return {name: after[name] - before[name] for name in before if name in after}, {}


def add_cell(
    rows: dict[str, list[dict[str, Any]]],
    record: Mapping[str, Any],
    folder: Path,
    slos: Slos | None = None,
    counting: Counting | None = None,
) -> None:
    """Add a cell's rows: its metrics and acceptance when it succeeded, its requests whenever there are any.

    `rows` has the lists `cells`, `acceptance` and `requests`; `folder` holds the raw data of the record; `counting`
    counts the tokens of its answers where the server did not.
    """
    cell = _cell_columns(record) | {name: record[name] for name in columns.CELL if name in record}
    status = status_of(record)
    cell |= {"status": status, "reason": reason_of(record), "tokenizer_sha256": counting.sha256 if counting else None}
    rows["cells"].append(cell)
    path = folder / REQUESTS
    if not path.exists():
        return
    requests = requests_table.read(path)
    if counting:
        requests = recounted(requests, counting.tokenizer)
    parsed = metrics.parse(requests)
    key = {name: cell[name] for name in (*columns.DETAIL_KEY, "plan_key")}
    rows["requests"] += [key | row for row in metrics.request_metrics(parsed).to_dict("records")]
    if status != "failed":
        cell |= _measured(record, requests, parsed, _samples(folder), slos)
    if status == "ok":
        rows["acceptance"] += [key | row for row in metrics.acceptance_by_depth(parsed).to_dict("records")]


def _measured(
    record: Mapping[str, Any],
    requests: pd.DataFrame,
    parsed: Sequence[Request],
    samples: pd.DataFrame,
    slos: Slos | None,
) -> dict[str, Any]:
    """The metrics of a cell that succeeded, and whether they hold together."""
    load, method = _load(record["identity"]["load"]), _method(record)
    values, missing = counted(record)
    found = metrics.cell_metrics(parsed, load, method, slos, values)
    planned = record.get("planned", len(requests))
    rows = [one.row for one in parsed]
    judged = checks(Checked(rows, found, load, method, samples, values, missing, planned))
    own = health(parsed, record.get("client") or {}, load, slos, cell=found)
    failed = [check.name for check in judged if check.ok is False] + [CLIENT_HEALTHY] * (own.ok is False)
    return {
        **found,
        **metrics.server_load(samples),
        **metrics.machine(record.get("telemetry"), found, record["host"]["gpus"] or []),
        "answered_sha256": _answered(requests),
        "counter_mismatch": _mismatch(judged),
        CLIENT_HEALTHY: own.ok,
        "client_event_lag_p99_s": own.event_lag_s["p99"],
        "client_send_late_p99_s": own.send_late_s["p99"],
        "checks_failed": " ".join(failed) or None,
    }


def _load(identity: Mapping[str, Any]) -> Load:
    return Load(identity["concurrency"], identity.get("kind", "closed"), identity.get("rate"), identity.get("arrivals"))


def _method(record: Mapping[str, Any]) -> str | None:
    """The method of a cell; None where an external endpoint did not confirm the one that was planned."""
    silent = (record.get("read_back") or {}).get("not_confirmed", ())
    return None if "speculative_algorithm" in silent else record["identity"]["server"]["method"]


def _samples(folder: Path) -> pd.DataFrame:
    path = folder / SERVER_SAMPLES
    return pd.read_parquet(path) if path.exists() else server_samples.frame([])


def _mismatch(judged: Sequence[Check]) -> bool | None:
    agreed = next(check.ok for check in judged if check.name == "tokens_agree")
    return None if agreed is None else not agreed


def _answered(requests: pd.DataFrame) -> str:
    ok = requests[requests["status"] == "ok"].sort_values("index")
    return keys.digest([[int(i), sha] for i, sha in zip(ok["index"], ok["prompt_sha256"], strict=True)])


def run_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a server start, from the records of its cells."""
    by_start: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        by_start.setdefault((record["labels"]["target"], str(record["start_id"])), []).append(record)
    return [_run_row(group) for group in by_start.values()]


def _run_row(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = min(records, key=lambda record: str(record["started_at"]))
    return {
        **_server_columns(first),
        "repeat": first["identity"]["repeat"],
        "block": first["block"],
        "start_id": first["start_id"],
        "start_status": "ok" if first.get("ready_s") is not None or _external(first) else "failed",
        "ready_s": first.get("ready_s"),
        "started_at": first["started_at"],
        "ended_at": max(str(record["ended_at"]) for record in records),
        **{f"cells_{name}": sum(status_of(record) == name for record in records) for name in get_args(Status)},
        **_read_back(first),
        **_host_columns(first["host"]),
    }


def _external(record: Mapping[str, Any]) -> bool:
    return bool(record["identity"]["server"]["environment"] == EXTERNAL)


def _host_columns(host: Mapping[str, Any]) -> dict[str, Any]:
    gpus = host["gpus"]
    models = sorted({gpu["name"] for gpu in gpus or []})
    return {
        "host_name": host.get("hostname"),
        "cpu_model": host["cpu"]["model"],
        "cpu_cores": host["cpu"]["cores"],
        "gpu_model": ", ".join(models) or None,
        "gpu_count": None if gpus is None else len(gpus),
        "driver": host["driver"],
        "kernel": host.get("kernel"),
    }
