"""The tidy tables: from views and the store to frames, and to CSV and back without loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ddtree_bench import columns, comparisons, keys, metrics
from ddtree_bench.records.files import sha256_file
from ddtree_bench.records.store import REQUESTS, StoreError, read_attempt
from ddtree_bench.records.views import read_view
from ddtree_bench.targets.probe import host_key

TABLES = ("cells", "runs", "speedup", "acceptance", "budget", "requests")
SIGNIFICANT_DIGITS = 12
PANDAS_TYPES = {"text": "object", "int": "Int64", "float": "float64", "bool": "boolean"}


class MissingEntry(FileNotFoundError):
    """A view whose store entry is absent or is not the one that the view was copied from."""


def build_tables(
    views: Sequence[Path], store: Path, named: Sequence[comparisons.Named] = ()
) -> dict[str, pd.DataFrame]:
    """Return the tables of `TABLES` for the given views.

    Parameters
    ----------
    views : sequence of paths
        Views of cells, in any order; warm-up views of runs may be among them and are passed over.
    store : path
        The store that holds the entries of the views.
    named : sequence of Named
        Comparisons that were named before measuring; Holm's correction runs over these.

    Raises
    ------
    MissingEntry
        A view's entry is absent or differs in content; the message names both.
    ValueError
        Two views stand for one cell; the message names both.
    KeyError
        A metric has no documentation in `columns`.
    """
    contents = [(path, read_view(path)) for path in sorted(set(views))]
    records = [(view, _attempt(path, view, store)) for path, view in contents if "entry" in view]
    _require_distinct([(path, view) for path, view in contents if "entry" in view])
    rows: dict[str, list[dict[str, Any]]] = {"cells": [], "acceptance": [], "requests": []}
    for record, folder in records:
        _add_cell(rows, record, folder)
    rows["runs"] = _run_rows([record for record, _ in records])
    frames = {name: typed(found, name) for name, found in rows.items()}
    frames["speedup"] = typed(comparisons.speedup_rows(frames["cells"], named), "speedup")
    frames["budget"] = typed(comparisons.budget_rows(frames["cells"]), "budget")
    return {name: frames[name] for name in TABLES}


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> list[Path]:
    """Write each table as `<folder>/<name>.csv` (UTF-8, LF, rows sorted, empty for NA) and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, frame in tables.items():
        path = folder / f"{name}.csv"
        partial = path.with_suffix(".csv.partial")
        frame.to_csv(partial, index=False, lineterminator="\n")
        partial.replace(path)
        paths.append(path)
    return paths


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Read what `write_tables` wrote; every value and type comes back as it was.

    Raises FileNotFoundError naming the table that is absent, and ValueError naming a column that is not documented.
    """
    tables = {}
    for name in TABLES:
        path = folder / f"{name}.csv"
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such table; `snakemake make_tables` makes it")
        raw = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
        tables[name] = _convert(raw, name)
    return tables


def typed(rows: Iterable[Mapping[str, Any]], table: str) -> pd.DataFrame:
    """Rows as the frame of a table: documented columns in their order, types, 12 significant digits, stable row order.

    Raises KeyError naming a column that `columns` does not document for this table.
    """
    known = columns.TABLES[table]
    rows = list(rows)
    unknown = sorted({key for row in rows for key in row} - set(known))
    if unknown:
        raise KeyError(f"table {table}: {', '.join(unknown)} not documented in ddtree_bench.columns")
    frame = _convert(pd.DataFrame(rows, columns=list(known), dtype=object), table)
    order = [key for key in columns.ORDER if key in known]
    return frame.sort_values(order, kind="stable", na_position="first", ignore_index=True)


def _convert(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    known = columns.TABLES[table]
    converted = {}
    for name in frame.columns:
        if name not in known:
            raise ValueError(f"table {table} has a column {name} that this version does not know")
        values, kind = frame[name], known[name].kind
        if kind == "float":
            numbers = pd.to_numeric(values).astype("float64")
            values = numbers.map(lambda x: float(f"{x:.{SIGNIFICANT_DIGITS}g}"))
        elif kind == "int":
            values = pd.to_numeric(values)
        elif kind == "bool":
            values = values.map({"True": True, "False": False, True: True, False: False})
        else:
            values = values.astype(object).where(values.notna(), None)
        converted[name] = values.astype(PANDAS_TYPES[kind])
    return pd.DataFrame(converted, columns=frame.columns)


def _require_distinct(views: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    seen: dict[str, Path] = {}
    for path, view in views:
        first = seen.setdefault(view["plan_key"], path)
        if first != path:
            raise ValueError(f"{first} and {path} stand for the same cell; delete the one whose name is out of date")


def _attempt(path: Path, view: Mapping[str, Any], store: Path) -> Path:
    """The folder of the attempt a view stands for, once its content is known to be the same."""
    try:
        attempt = read_attempt(store / view["entry"])
    except StoreError as error:
        raise MissingEntry(f"{path}: its entry is not in the store: {error}") from error
    if attempt.content_sha256 != view["content_sha256"]:
        raise MissingEntry(
            f"{path}: its entry {attempt.folder} is not what it was copied from; delete the view to copy it again"
        )
    requests, expected = attempt.folder / REQUESTS, attempt.record["files"].get(REQUESTS)
    if expected is not None and not (requests.is_file() and sha256_file(requests) == expected):
        raise MissingEntry(f"{path}: {requests} is missing or damaged; restore the store, or measure this cell again")
    return attempt.folder


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
        "machine_key": host_key(record["host"], server["model"]["name"], None),
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
        "concurrency": identity["load"]["concurrency"],
        "repeat": identity["repeat"],
    }


def _add_cell(rows: dict[str, list[dict[str, Any]]], record: Mapping[str, Any], folder: Path) -> None:
    """Add a cell's rows: its metrics and acceptance when it succeeded, its requests whenever there are any."""
    cell = _cell_columns(record) | {name: record[name] for name in columns.CELL if name in record}
    rows["cells"].append(cell)
    path = folder / REQUESTS
    if not path.exists():
        return
    requests = pd.read_parquet(path)
    key = {name: cell[name] for name in (*columns.DETAIL_KEY, "plan_key")}
    rows["requests"] += [key | row for row in metrics.request_metrics(requests).to_dict("records")]
    if record["status"] == "ok":
        cell |= metrics.cell_metrics(requests, cell["concurrency"], cell["method"])
        rows["acceptance"] += [key | row for row in metrics.acceptance_by_depth(requests).to_dict("records")]


def _run_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a server start, from the records of its cells."""
    by_start: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        by_start.setdefault((record["labels"]["target"], str(record["start_id"])), []).append(record)
    return [_run_row(group) for group in by_start.values()]


def _run_row(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = min(records, key=lambda record: str(record["started_at"]))
    info = first.get("server_info") or {}
    return {
        **_server_columns(first),
        "repeat": first["identity"]["repeat"],
        "block": first["block"],
        "start_id": first["start_id"],
        "start_status": "ok" if first.get("ready_s") is not None else "failed",
        "ready_s": first.get("ready_s"),
        "started_at": first["started_at"],
        "ended_at": max(str(record["ended_at"]) for record in records),
        "cells_ok": sum(record["status"] == "ok" for record in records),
        "cells_failed": sum(record["status"] != "ok" for record in records),
        "engine_version": info.get("version"),
        **{name: info.get(name) for name in ("numerics", "bit_exact", "threads")},
        **_host_columns(first["host"]),
    }


def _host_columns(host: Mapping[str, Any]) -> dict[str, Any]:
    gpus = host["gpus"]
    return {
        "host_name": host.get("hostname"),
        "cpu_model": host["cpu"]["model"],
        "cpu_cores": host["cpu"]["cores"],
        "gpu_model": ", ".join(sorted({gpu["name"] for gpu in gpus})) or None,
        "gpu_count": len(gpus),
        "driver": host["driver"],
        "kernel": host.get("kernel"),
    }
