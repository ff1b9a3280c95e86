"""The raw record of a cell, one row a request: its columns, how rows come from exchanges, and parquet in and out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ddtree_bench.load import sse
from ddtree_bench.load.client import Exchange
from ddtree_bench.load.prompts import Prompt

SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("prompt_id", pa.string()),
        ("category", pa.string()),
        ("prompt_sha256", pa.string()),
        ("worker", pa.int64()),
        ("max_tokens", pa.int64()),
        ("t_send", pa.float64()),
        ("t_end", pa.float64()),
        ("event_times", pa.list_(pa.float64())),
        ("event_kinds", pa.list_(pa.string())),
        ("event_texts", pa.list_(pa.string())),
        ("event_tokens", pa.list_(pa.int64())),
        ("event_finish", pa.list_(pa.bool_())),
        ("http_status", pa.int64()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("cached_prompt_tokens", pa.int64()),
        ("spec", pa.string()),
        ("text", pa.string()),
        ("intended_start", pa.float64()),
    ]
)
"""Moments are seconds of time.perf_counter(). `event_times[i]` is when the bytes that completed event i were read;
`event_tokens[i]` the completion tokens so far by continuous usage, null where the event does not say.
`completion_tokens` is the last count the server gave, also for a request that failed. `spec` is the JSON of
spec_tokens_details. `intended_start` is set for open-loop load."""

STATUSES = ("ok", "http_error", "error_event", "truncated", "timeout", "connect_error", "empty")

_ERROR_CHARS = 500

_BROKEN_OFF = ("abort", "error")
"""Finish reasons with which engines end an answer that they did not finish."""


@dataclass(frozen=True)
class Sent:
    """A request of a cell: its place in the cell's ordered prompts, who sent it, and what came of it."""

    index: int
    prompt: Prompt
    worker: int
    exchange: Exchange
    intended_start: float | None = None


def row(sent: Sent, max_tokens: int) -> dict[str, Any]:
    """Return the row of one request, with the columns of SCHEMA."""
    exchange = sent.exchange
    streamed = exchange.http_status == 200
    events = [sse.classify(raw) for raw in sse.split(exchange.reads)] if streamed else []
    usages = [event.usage for event in events if event.usage]
    specs = [event.spec for event in events if event.spec]
    last_usage = usages[-1] if usages else None
    status, error = _status(exchange, events)
    return {
        "index": sent.index,
        "prompt_id": sent.prompt.id,
        "category": sent.prompt.category,
        "prompt_sha256": sent.prompt.sha256,
        "worker": sent.worker,
        "max_tokens": max_tokens,
        "t_send": exchange.t_send,
        "t_end": exchange.t_end,
        "event_times": [event.time for event in events],
        "event_kinds": [event.kind for event in events],
        "event_texts": [event.text for event in events],
        "event_tokens": [event.tokens for event in events],
        "event_finish": [event.finish_reason is not None for event in events],
        "http_status": exchange.http_status,
        "status": status,
        "error": error,
        "finish_reason": next((event.finish_reason for event in reversed(events) if event.finish_reason), None),
        "prompt_tokens": sse.integer(last_usage, "prompt_tokens"),
        "completion_tokens": sse.integer(last_usage, "completion_tokens"),
        "cached_prompt_tokens": sse.integer((last_usage or {}).get("prompt_tokens_details"), "cached_tokens"),
        "spec": json.dumps(specs[-1], sort_keys=True) if specs else None,
        "text": "".join(event.text for event in events),
        "intended_start": sent.intended_start,
    }


def _status(exchange: Exchange, events: Sequence[sse.Event]) -> tuple[str, str | None]:
    """The status of a request and, unless it is ok, what went wrong.

    An answer that ended by itself is complete however its connection ended after that; an error object anywhere in the
    stream, and a finish_reason that says the server gave up, is a failure however much came before it.
    """
    if exchange.http_status is not None and exchange.http_status != 200:
        return "http_error", f"HTTP {exchange.http_status}: {_message(exchange.body)}"
    if errors := [event.error for event in events if event.error]:
        return "error_event", errors[0]
    if reasons := [event.finish_reason for event in events if event.finish_reason in _BROKEN_OFF]:
        return "error_event", f"the server ended the answer with finish_reason {reasons[0]!r}"
    if any(event.finish_reason or event.kind == "done" for event in events):
        if any(event.kind == "token" for event in events):
            return "ok", None
        return "empty", "the answer ended without a token-bearing event"
    if exchange.failure:
        return exchange.failure.status, exchange.failure.message
    if not events and exchange.body:
        return _unstreamed(exchange)
    return "truncated", "the stream ended without finish_reason and without [DONE]"


def _unstreamed(exchange: Exchange) -> tuple[str, str]:
    """The status of a 200 answer that is no event stream; some servers send an error object in this way."""
    if message := sse.error_message(sse.parse(exchange.body)):
        return "error_event", message
    return "truncated", f"the answer is no event stream (Content-Type {exchange.content_type!r})"


def _message(body: bytes) -> str:
    message = sse.error_message(sse.parse(body)) or body.decode("utf-8", "replace")
    return message[:_ERROR_CHARS]


def to_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame with the types that `read` gives: nullable integers are Int64, lists numpy arrays."""
    return _to_pandas(pa.Table.from_pylist(list(rows), schema=SCHEMA))


def write(requests: pd.DataFrame, path: str | Path) -> None:
    """Write a frame of requests to a parquet file, columns and types as in SCHEMA."""
    pq.write_table(pa.Table.from_pandas(requests, schema=SCHEMA, preserve_index=False), path, compression="zstd")


def read(path: str | Path) -> pd.DataFrame:
    """Read what `write` wrote. Raises ValueError, naming the columns, when the file has others than SCHEMA."""
    table = pq.read_table(path)
    if set(table.column_names) != set(SCHEMA.names):
        differing = sorted(set(table.column_names) ^ set(SCHEMA.names))
        raise ValueError(f"{path}: not a table of requests, it differs in {differing}; measure the cell again")
    return _to_pandas(table.select(SCHEMA.names).cast(SCHEMA))


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame
