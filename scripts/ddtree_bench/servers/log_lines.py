"""SGLang's log, releases 0.5.14 to 0.5.23: its batches, retractions and graph captures as tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

PLACE = {"time": "datetime64[ns]", "dp_rank": "Int64", "pp_rank": "Int64", "tp_rank": "Int64"}
"""Columns of every frame. The time is the server's local one, whole seconds unless SGLANG_LOG_MS is set; a rank is NA
where there is only one."""

_BATCH = {"running": "Int64", "queued": "Int64", "tokens": "Int64", "token_usage": "Float64", "cuda_graph": "boolean"}
DECODE = {
    **PLACE,
    **_BATCH,
    "accept_length": "Float64",
    "accept_rate": "Float64",
    "gen_throughput_tok_s": "Float64",
}
PREFILL = {
    **PLACE,
    **_BATCH,
    "new_requests": "Int64",
    "new_tokens": "Int64",
    "cached_tokens": "Int64",
    "pending_tokens": "Int64",
    "input_throughput_tok_s": "Float64",
}
RETRACTIONS = {**PLACE, "requests": "Int64", "tokens_gained": "Int64"}
CAPTURES = {
    **PLACE,
    "model": "string",
    "stage": "string",
    "event": "string",
    "width": "Int64",
    "batch_sizes": "string",
    "elapsed_s": "Float64",
    "memory_gb": "Float64",
}

_PREFIX = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)((?: [A-Z][A-Z_]*\d+)*)\] ")
_RANK = re.compile(r" (DP|PP|TP)(\d+)")
_LINE = re.compile(
    r"(?P<batch>Decode|Prefill) batch(?: \[\d+\])?, (?P<fields>#.*)"
    r"|KV cache pool is full\. Retract requests\. #retracted_reqs: (?P<requests>\d+)"
    r"(?:, #new_tokens_gained: (?P<gained>\d+))?"
    r"|Capture (?P<model>\w+) (?P<stage>\w+) CUDA graph (?P<event>begin|end)\. (?P<details>.*)"
)
_WIDTH = re.compile(r"num_tokens_per_(?:bs|req)=(\d+)")  # bs up to 0.5.15
_SIZES = re.compile(r"\bbs=\[([\d, ]*)\]")  # at the begin up to 0.5.21, at the end from 0.5.22
_ELAPSED = re.compile(r"elapsed=([\d.]+) s")
_MEMORY = re.compile(r"mem usage=(-?[\d.]+) GB")

_COLUMNS = {
    "#running-req": "running",
    "#queue-req": "queued",
    "#token": "tokens",
    "#full token": "tokens",
    "token usage": "token_usage",
    "full token usage": "token_usage",
    "accept len": "accept_length",
    "accept rate": "accept_rate",
    "gen throughput (token/s)": "gen_throughput_tok_s",
    "#new-seq": "new_requests",
    "#new-token": "new_tokens",
    "#cached-token": "cached_tokens",
    "#pending-token": "pending_tokens",
    "input throughput (token/s)": "input_throughput_tok_s",
    **{f"{device} graph": "cuda_graph" for device in ("cuda", "cpu", "npu", "musa")},
}


@dataclass(frozen=True)
class ServerLog:
    """What a log says, a row a line, in its order; columns and dtypes of DECODE, PREFILL, RETRACTIONS and CAPTURES.

    A decode line is the report of 40 steps (--decode-log-interval) of one data-parallel rank. Its `accept_length` has
    drafts and bonus, what is cut later included and the prefill's token not; its `cuda_graph` is that of its last step
    alone. A retraction is reported by every rank. `width` of a capture is the number of tokens a request brings to the
    pass: a tree's budget and its root.
    """

    decode: pd.DataFrame
    prefill: pd.DataFrame
    retractions: pd.DataFrame
    captures: pd.DataFrame

    def between(self, begin: pd.Timestamp, end: pd.Timestamp) -> ServerLog:
        """Return the lines of [begin, end], in the server's local time; those without a time are not among them."""
        frames = (self.decode, self.prefill, self.retractions, self.captures)
        return ServerLog(*(frame[frame["time"].between(begin, end)].reset_index(drop=True) for frame in frames))


def parse_log(text: str) -> ServerLog:
    """Return the lines of a log that are known; all others are passed over, wherever they come from."""
    rows: dict[str, list[dict[str, Any]]] = {"Decode": [], "Prefill": [], "retraction": [], "capture": []}
    for line in text.splitlines():
        if (match := _LINE.search(line)) is not None:
            kind, values = _values(match)
            rows[kind].append(_place(line[: match.start()]) | values)
    shapes = (DECODE, PREFILL, RETRACTIONS, CAPTURES)
    return ServerLog(*(_frame(found, shape) for found, shape in zip(rows.values(), shapes, strict=True)))


def _values(match: re.Match[str]) -> tuple[str, dict[str, Any]]:
    if match["batch"]:
        return match["batch"], dict(_fields(match["fields"]))
    if match["requests"]:
        gained = match["gained"]
        return "retraction", {"requests": int(match["requests"]), "tokens_gained": int(gained) if gained else None}
    details = match["details"]
    return "capture", {
        "model": match["model"],
        "stage": match["stage"],
        "event": match["event"],
        "width": _found(_WIDTH, details, int),
        "batch_sizes": _found(_SIZES, details, str),
        "elapsed_s": _found(_ELAPSED, details, float),
        "memory_gb": _found(_MEMORY, details, float),
    }


def _fields(text: str) -> Iterator[tuple[str, Any]]:
    """The `name: value` parts under our names; a part that is not known, or whose value is none, is passed over."""
    for part in text.split(", "):
        name, _, value = part.partition(": ")
        column = _COLUMNS.get(name.strip())
        if column == "cuda_graph":
            yield column, {"True": True, "False": False}.get(value.strip())
        elif column is not None and re.fullmatch(r"-?\d+(\.\d+)?", value.strip()):
            yield column, float(value)


def _found(pattern: re.Pattern[str], text: str, kind: Callable[[str], Any]) -> Any:
    match = pattern.search(text)
    return kind(match[1]) if match else None


def _place(before: str) -> dict[str, Any]:
    match = _PREFIX.search(before)
    if match is None:
        return {}
    ranks = {name: int(rank) for name, rank in _RANK.findall(match[2])}
    return {
        "time": pd.Timestamp(match[1].replace(",", ".")),
        "dp_rank": ranks.get("DP"),
        "pp_rank": ranks.get("PP"),
        "tp_rank": ranks.get("TP"),
    }


def _frame(rows: list[dict[str, Any]], shape: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(shape)).astype(shape)


WHY_NOT_LOGGED: Mapping[str, str] = {
    "decode_lines": "",
    "cuda_graph_line_share": "no decode report tells of a graph: the first comes after 40 steps",
    "logged_accept_length_mean": "no decode report tells of an accept length: it needs 40 steps, and speculation",
    "running_max": "no decode report: the first comes after 40 steps (--decode-log-interval)",
    "retracted_requests": "",
    "verify_width": "the log has no capture of a graph for verify passes, or several of other widths",
}
"""What is told of a cell's log lines, and why one may be missing beside others; "" for those that never are."""


def log_summary(log: ServerLog) -> dict[str, float | int | None]:
    """Return what the log says of the time it covers, None where it says nothing.

    decode_lines : number of decode reports.
    cuda_graph_line_share : share of these whose last step ran in a graph.
    logged_accept_length_mean : mean of the reports' accept lengths. It is the server's figure and no form of ours:
        reports weigh the same however many rounds they cover, and tokens that a request's end cuts are in them.
    running_max : most requests that ran in any report of one data-parallel rank.
    retracted_requests : of each data-parallel rank once, though every tensor- and pipeline-parallel rank reports them.
    verify_width : tokens a request brings to a verify pass, as it was captured; None without a capture or with several.
    """
    decode, captures = log.decode, log.captures
    widths = captures.loc[captures["model"].eq("target") & captures["stage"].eq("verify"), "width"].dropna().unique()
    graph, lengths, running = (decode[name].dropna() for name in ("cuda_graph", "accept_length", "running"))
    return {
        "decode_lines": len(decode),
        "cuda_graph_line_share": float(graph.mean()) if len(graph) else None,
        "logged_accept_length_mean": float(lengths.mean()) if len(lengths) else None,
        "running_max": int(running.max()) if len(running) else None,
        "retracted_requests": _retracted(log.retractions),
        "verify_width": int(widths[0]) if len(widths) == 1 else None,
    }


def cell_log(path: Path | None, begin: int, end: int | None = None) -> dict[str, Any]:
    """Return what a server's log says of a cell: {"values": ..., "missing": ...}, why others are not there by name.

    Values as `log_summary` has them, of the bytes [begin, end) of the file: what was written while the cell was
    measured, whatever the server's clock and time zone. The verify width is that of a capture before it. `path` is None
    for a server whose log is not to be had. Raises nothing.
    """
    try:
        written = b"" if path is None else path.read_bytes()[:end]
    except OSError as error:
        return nothing_logged(f"the server's log cannot be read: {error.strerror or error}")
    if path is None:
        return nothing_logged("the server was not started here, so its log is not to be had")
    lines = parse_log(written[begin:].decode("utf-8", "replace"))
    if lines.decode.empty and lines.prefill.empty:
        return nothing_logged("the server logged no batch that is known while the cell was measured")
    captures = b"\n".join(line for line in written.splitlines() if b"Capture " in line)
    values = log_summary(replace(lines, captures=parse_log(captures.decode("utf-8", "replace")).captures))
    missing = {name: WHY_NOT_LOGGED[name] for name, value in values.items() if value is None}
    return {"values": {name: value for name, value in values.items() if value is not None}, "missing": missing}


def log_size(path: Path | None) -> int:
    """Return how much of a server's log is written now, bytes; 0 without one."""
    try:
        return 0 if path is None else path.stat().st_size
    except OSError:
        return 0


def nothing_logged(reason: str) -> dict[str, Any]:
    """Return what `cell_log` returns where nothing is known of a cell, for a reason."""
    return {"values": {}, "missing": dict.fromkeys(WHY_NOT_LOGGED, reason)}


def _retracted(retractions: pd.DataFrame) -> int:
    by_rank = retractions.groupby(["dp_rank", "pp_rank", "tp_rank"], dropna=False)["requests"].sum()
    return int(by_rank.groupby("dp_rank", dropna=False).max().sum())
