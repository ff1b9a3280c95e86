"""What a measurement showed, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 160

Document = Mapping[str, Any]

UNKNOWN = "–"

LATENCIES = (
    ("ttft_s", "TTFT, from the send", "ms"),
    ("ttft_from_intended_s", "TTFT, from the intended start", "ms"),
    ("tpot_s", "TPOT", "ms/token"),
    ("itl_s", "ITL", "ms/token"),
    ("icl_s", "ICL, between events", "ms"),
    ("e2e_s", "E2E, from the send", "ms"),
    ("e2e_from_intended_s", "E2E, from the intended start", "ms"),
)

VALUES = (
    ("output_tokens", "output tokens of ok requests", "tokens"),
    ("throughput_tok_s", "throughput, full", "tokens/s"),
    ("throughput_steady_tok_s", "throughput, steady", "tokens/s"),
    ("peak_tok_s", "peak over 1 s", "tokens/s"),
    ("per_user_tok_s", "speed of one user", "tokens/s"),
    ("goodput", "goodput", "requests/s"),
    ("accept_length", "accept length, pooled", "tokens/round"),
    ("accept_length_rounds", "accept length, over rounds", "tokens/round"),
    ("accept_length_macro", "accept length, over requests", "tokens/round"),
)


def rendered(document: Document) -> str:
    """Return the content of metrics.json as tables with units, and the checks that failed with their details."""
    output = StringIO()
    console = Console(file=output, width=WIDTH, no_color=True)
    console.print(_values(document))
    console.print(_latencies(document))
    return "\n".join(
        [*(line.rstrip() for line in output.getvalue().splitlines() if line.strip()), "", *_verdict(document)]
    )


def _values(document: Document) -> Table:
    table = _table("", "value", "unit")
    table.add_row("requests ok", f"{document['requests']['ok']} of {document['requests_planned']}", "requests")
    for key, name, unit in VALUES:
        if document.get(key) is not None:
            mark = "  (in figures)" if document.get("throughput_window") == name.rpartition(" ")[2] else ""
            table.add_row(name, number(document[key]), unit + mark)
    return table


def _latencies(document: Document) -> Table:
    table = _table("latency", "mean", "p50", "p90", "p99", "unit")
    for key, name, unit in LATENCIES:
        found = document.get(key)
        if found and any(value is not None for value in found.values()):
            values = [found[which] for which in ("mean", "p50", "p90", "p99")]
            table.add_row(name, *(number(None if value is None else value * 1e3) for value in values), unit)
    return table


def _table(name: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    return table


def _verdict(document: Document) -> Iterator[str]:
    reason = f": {document['reason']}" if document.get("reason") else ""
    yield f"status: {document['status']}{reason}"
    others = {k: n for k, n in document["requests"].items() if k != "ok" and n}
    if document["requests_not_sent"]:
        others["not sent"] = document["requests_not_sent"]
    if others:
        yield "requests that were not ok: " + ", ".join(f"{n} {status}" for status, n in others.items())
    checks = document["checks"]
    for check in checks:
        if check["ok"] is False:
            yield f"check failed: {check['name']}: {check['detail']}"
    unknown = [check["name"] for check in checks if check["ok"] is None]
    if unknown:
        yield f"checks that could not be judged (metrics.json says why): {', '.join(unknown)}"


def number(value: float | None) -> str:
    """Return a number as it is shown: whole ones as they are, others with four digits that count."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
