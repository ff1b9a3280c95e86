"""The raw record of a cell, one row a request: its columns, how rows come from exchanges, and parquet in and out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ddtree_bench.load import sse
from ddtree_bench.load.exchange import Exchange
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.load.wire import Answer, parse_answer

if TYPE_CHECKING:
    from ddtree_bench.load.tokenizer import Tokenizer

SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("prompt_id", pa.string()),
        ("category", pa.string()),
        ("prompt_sha256", pa.string()),
        ("worker", pa.int64()),
        ("max_tokens", pa.int64()),
        ("intended_start", pa.float64()),
        ("t_send", pa.float64()),
        ("t_sent", pa.float64()),
        ("t_end", pa.float64()),
        ("connect_s", pa.float64()),
        ("retries", pa.int64()),
        ("end_lag", pa.float32()),
        ("send_blocked_s", pa.float64()),
        ("event_times", pa.list_(pa.float64())),
        ("event_lags", pa.list_(pa.float32())),
        ("event_kinds", pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        ("event_texts", pa.list_(pa.string())),
        ("event_tokens", pa.list_(pa.int64())),
        ("event_tokenized", pa.list_(pa.int64())),
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
    ]
)
"""Moments are seconds of time.perf_counter(). `t_send` and `t_sent` are just before and after the request was handed to
the kernel, `intended_start` is when it was to be sent (open loop only), `connect_s` what connecting took where there
was no open connection, `retries` the attempts to connect after the first. `end_lag` is the lag of the
read that completed the answer, `send_blocked_s` the part of t_sent - t_send in which the kernel took no more bytes.

`event_times[i]` is when the bytes that completed event i were read, and `event_lags[i]` how long they had lain unread
by then, NaN where the kernel does not say. `event_tokens[i]` are the completion tokens so far by continuous usage, null
where the event does not say; `event_tokenized[i]` the tokens that came with event i by the tokenizer, the whole list
null where there was none. `completion_tokens` is the last count the server gave, also for a request that failed. `spec`
is the JSON of spec_tokens_details."""

ADDED = (
    "intended_start",
    "t_sent",
    "connect_s",
    "retries",
    "end_lag",
    "send_blocked_s",
    "event_lags",
    "event_tokenized",
)
"""Columns that older files lack; they are null there."""

STATUSES = ("ok", "http_error", "error_event", "truncated", "timeout", "connect_error", "empty")

_BATCH = 256
"""Rows that are Python objects at once: a list of a million floats takes four times the memory of an array."""

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


def row(sent: Sent, max_tokens: int, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the row of one request, with the columns of SCHEMA.

    With a tokenizer the tokens of each event are counted as well, whether or not the server counts them.
    """
    exchange = sent.exchange
    answer = parse_answer(exchange)
    events = [sse.classify(raw) for raw in sse.split(answer.body)] if answer.http_status == 200 else []
    status, error = _status(exchange, answer, events)
    return {
        "index": sent.index,
        "prompt_id": sent.prompt.id,
        "category": sent.prompt.category,
        "prompt_sha256": sent.prompt.sha256,
        "worker": sent.worker,
        "max_tokens": max_tokens,
        "intended_start": sent.intended_start,
        "t_send": exchange.t_send,
        "t_sent": exchange.t_sent,
        "t_end": exchange.t_end,
        "connect_s": exchange.connect_s,
        "retries": exchange.retries,
        "end_lag": exchange.end_lag,
        "send_blocked_s": exchange.send_blocked_s,
        "http_status": answer.http_status,
        "status": status,
        "error": error,
        **_events(events, tokenizer),
        **_said(events),
    }


def _events(events: Sequence[sse.Event], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The columns with a value an event."""
    texts = [event.text for event in events]
    return {
        "event_times": [event.time for event in events],
        "event_lags": [event.lag for event in events],
        "event_kinds": [event.kind for event in events],
        "event_texts": texts,
        "event_tokens": [event.tokens for event in events],
        "event_tokenized": tokenizer.counts(texts) if tokenizer else None,
        "event_finish": [event.finish_reason is not None for event in events],
        "text": "".join(texts),
    }


def _said(events: Sequence[sse.Event]) -> dict[str, Any]:
    """What the server said of the whole answer."""
    last_usage = next((event.usage for event in reversed(events) if event.usage), None)
    spec = next((event.spec for event in reversed(events) if event.spec), None)
    return {
        "finish_reason": next((event.finish_reason for event in reversed(events) if event.finish_reason), None),
        "prompt_tokens": sse.integer(last_usage, "prompt_tokens"),
        "completion_tokens": sse.integer(last_usage, "completion_tokens"),
        "cached_prompt_tokens": sse.integer((last_usage or {}).get("prompt_tokens_details"), "cached_tokens"),
        "spec": json.dumps(spec, sort_keys=True) if spec else None,
    }


def _status(exchange: Exchange, answer: Answer, events: Sequence[sse.Event]) -> tuple[str, str | None]:
    """The status of a request and, unless it is ok, what went wrong.

    An answer that ended by itself is complete however its connection ended after that; an error object anywhere in the
    stream, and a finish_reason that says the server gave up, is a failure however much came before it.
    """
    if answer.http_status is not None and answer.http_status != 200:
        return "http_error", f"HTTP {answer.http_status}: {_message(_content(answer))}"
    if errors := [event.error for event in events if event.error]:
        return "error_event", errors[0][:_ERROR_CHARS]
    if reasons := [event.finish_reason for event in events if event.finish_reason in _BROKEN_OFF]:
        return "error_event", f"the server ended the answer with finish_reason {reasons[0]!r}"
    if any(event.finish_reason or event.kind == "done" for event in events):
        if any(event.kind == "token" for event in events):
            return "ok", None
        return "empty", "the answer ended without a token-bearing event"
    return _unfinished(exchange, answer, events)


def _unfinished(exchange: Exchange, answer: Answer, events: Sequence[sse.Event]) -> tuple[str, str]:
    """The status of an answer that does not say that it is complete."""
    if exchange.failure:
        return exchange.failure.status, exchange.failure.message
    if answer.broken:
        return "truncated", f"the answer's framing is broken: {answer.broken}"
    if answer.http_status is None:
        return "connect_error", "the connection closed before an answer came"
    content = _content(answer)
    if not events and content:
        return _unstreamed(content, answer.content_type)
    return "truncated", "the stream ended without finish_reason and without [DONE]"


def _content(answer: Answer) -> bytes:
    return b"".join(piece for _, _, piece in answer.body)


def _unstreamed(content: bytes, content_type: str) -> tuple[str, str]:
    """The status of a 200 answer that is no event stream; some servers send an error object in this way."""
    if message := sse.error_message(sse.parse(content)):
        return "error_event", message[:_ERROR_CHARS]
    return "truncated", f"the answer is no event stream (Content-Type {content_type!r})"


def _message(body: bytes) -> str:
    message = sse.error_message(sse.parse(body)) or body.decode("utf-8", "replace")
    return message[:_ERROR_CHARS]


def to_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame with the types that `read` gives: nullable integers are Int64, lists numpy arrays.

    Rows are taken one batch after another, so an iterator that makes them as it goes never holds many.
    """
    left = iter(rows)
    batches = []
    while batch := list(islice(left, _BATCH)):
        batches.append(pa.RecordBatch.from_pylist(batch, schema=SCHEMA))
    return _to_pandas(pa.Table.from_batches(batches, schema=SCHEMA))


def write(requests: pd.DataFrame, path: str | Path, derived: pd.DataFrame | None = None) -> None:
    """Write a frame of requests to a parquet file, columns and types as in SCHEMA.

    `derived` has a row of its own for each request, in the same order; its columns follow those of SCHEMA, but for
    those that have the name of one. `read` leaves them out.
    """
    table = pa.Table.from_pandas(requests, schema=SCHEMA, preserve_index=False)
    if derived is not None:
        further = derived[[name for name in derived.columns if name not in SCHEMA.names]]
        for name, column in zip(further.columns, pa.Table.from_pandas(further, preserve_index=False), strict=True):
            table = table.append_column(name, column)
    pq.write_table(table, path, compression="zstd")


def read(path: str | Path) -> pd.DataFrame:
    """Read the columns of SCHEMA from a parquet file, whatever derived columns it has beside them.

    Columns of ADDED that an older file lacks are null. Raises ValueError, naming them, when it lacks others.
    """
    found = pq.read_schema(path).names
    if missing := [name for name in SCHEMA.names if name not in found and name not in ADDED]:
        raise ValueError(f"{path}: not a table of requests, it has no column {missing}; measure the cell again")
    table = pq.read_table(path, columns=[name for name in SCHEMA.names if name in found])
    for name in ADDED:
        if name not in found:
            table = table.append_column(name, pa.nulls(table.num_rows, SCHEMA.field(name).type))
    return _to_pandas(table.select(SCHEMA.names).cast(SCHEMA))


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame
