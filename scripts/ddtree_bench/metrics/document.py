"""The content of metrics.json: everything that is known of a cell, under the names that readers of the file use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import pandas as pd

from ddtree_bench.load.requests_table import STATUSES
from ddtree_bench.metrics.cells import Scalars, cell_metrics
from ddtree_bench.metrics.checks import Check, Checked, checks
from ddtree_bench.metrics.client_health import health
from ddtree_bench.metrics.parsed import Requests, parse
from ddtree_bench.metrics.percentiles import GIVEN
from ddtree_bench.metrics.server_load import server_load
from ddtree_bench.metrics.slos import Slos
from ddtree_bench.metrics.speculation import depth_probabilities
from ddtree_bench.plan import Load

FORMAT = 1

LATENCIES = ("ttft", "tpot", "itl", "icl", "e2e")
FROM_INTENDED = ("ttft_from_intended", "e2e_from_intended")

NAMES = {
    "throughput_full_tok_s": "throughput_tok_s",
    "peak_throughput_tok_s": "peak_tok_s",
    "user_speed_tok_s": "per_user_tok_s",
    "goodput_req_s": "goodput",
}
"""Names of the file that differ from those of the tables."""


class Counters(Protocol):
    """The differences of a server's counters, as servers.observation has them."""

    @property
    def values(self) -> Mapping[str, float]:
        """The differences by name."""

    @property
    def missing(self) -> Mapping[str, str]:
        """Why others are not there, by name."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader should know."""


def document(
    requests: pd.DataFrame,
    load: Load,
    client: Mapping[str, float | int | bool | None],
    server_samples: pd.DataFrame,
    counters: Counters | Mapping[str, Any] | None,
    planned: int,
    aborted: str | None,
    method: str | None = None,
    slos: Slos | None = None,
    *,
    parsed: Requests | None = None,
) -> dict[str, Any]:
    """Return what is known of a cell as JSON has it: plain values, None for what is not known.

    Parameters
    ----------
    requests : DataFrame
        Raw rows of the cell, columns as in requests_table.SCHEMA.
    load : Load
        The load that was to be given.
    client : mapping
        The client's record of itself, keys as in load.cell.Measurement.client.
    server_samples : DataFrame
        Columns of server_samples.COLUMNS.
    counters : Counters, mapping or None
        The differences of the server's counters over the cell: `values` by name, and in `missing` why others are not
        there; `notes` are what a reader should know. As an object or as JSON has it; None when the server was not
        asked.
    planned : int
        Requests that were to be sent.
    aborted : str or None
        Why the cell was ended early.
    method : str, optional
        AR, DFLASH or DDTREE.
    slos : Slos, optional
        The objectives of goodput.
    parsed : parsed requests, optional
        What `parse` made of `requests`, where it was called before.

    The status is `failed` when no request was ok, `partial` when one was not, or was not sent, or the cell was ended
    early, and `ok` otherwise.
    """
    known = parse(requests if parsed is None else parsed)
    values, missing, notes = _counters(counters)
    cell = cell_metrics(known, load, method, slos, values)
    rows = [one.row for one in known]
    found = checks(Checked(rows, cell, load, method, server_samples, values, missing, planned, notes))
    own = health(known, client, load, slos, cell=cell)
    probabilities, rounds = depth_probabilities(one.details for one in known if one.answer is not None)
    return _plain(
        {
            "format": FORMAT,
            **_status(cell, planned, aborted),
            "load": asdict(load),
            "method": method,
            "slos": asdict(slos) if slos is not None else None,
            "requests": _requests(cell),
            "requests_planned": planned,
            "requests_not_sent": max(0, planned - int(cell["requests"] or 0)),
            **_values(cell, load),
            "acceptance_by_depth": probabilities,
            "acceptance_rounds": rounds,
            "client": {**client, **own.numbers},
            "server": {
                **server_load(server_samples),
                "counters": dict(values),
                "missing": dict(missing),
                "notes": list(notes),
            },
            "checks": [asdict(check) for check in (*found, Check("client_healthy", own.ok, own.detail))],
        }
    )


def _status(cell: Scalars, planned: int, aborted: str | None) -> dict[str, str | None]:
    counts = {status: int(cell[f"requests_{status}"] or 0) for status in STATUSES}
    not_sent = max(0, planned - int(cell["requests"] or 0))
    wrong = [f"{n} {status}" for status, n in counts.items() if n and status != "ok"]
    wrong += [f"{not_sent} not sent"] if not_sent else []
    reason = f"{counts['ok']} of {planned} requests were ok ({', '.join(wrong)})" if wrong else None
    reason = "; ".join(one for one in (aborted, reason) if one) or None
    if not counts["ok"]:
        return {"status": "failed", "reason": reason or "no request was sent"}
    return {"status": "partial" if reason else "ok", "reason": reason}


def _requests(cell: Scalars) -> dict[str, int]:
    return {status: int(cell[f"requests_{status}"] or 0) for status in STATUSES}


def _values(cell: Scalars, load: Load) -> dict[str, Any]:
    """The metrics of the cell; latencies as objects, the counts of requests left out."""
    latencies = LATENCIES + (FROM_INTENDED if load.kind == "open" else ())
    statistics = ("mean", *(f"p{percent}" for percent in GIVEN))
    objects = {f"{name}_s": {one: cell[f"{name}_{one}_s"] for one in statistics} for name in latencies}
    in_objects = {f"{name}_{one}_s" for name in LATENCIES + FROM_INTENDED for one in statistics}
    scalars = {
        NAMES.get(name, name): value
        for name, value in cell.items()
        if name not in in_objects and not name.startswith("requests_") and name != "requests"
    }
    return {**scalars, "requests_per_s": cell["requests_per_s"], **objects}


def _counters(
    counters: Counters | Mapping[str, Any] | None,
) -> tuple[Mapping[str, float], Mapping[str, str], Sequence[str]]:
    if counters is None:
        return {}, {}, ()
    if isinstance(counters, Mapping):
        return counters.get("values") or {}, counters.get("missing") or {}, counters.get("notes") or ()
    return counters.values, counters.missing, counters.notes


def _plain(value: Any) -> Any:
    """A value as JSON has it: null for what is not a finite number."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
