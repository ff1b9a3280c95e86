"""Server-sent events: from the bytes of a stream to events, and from an event to what it says.

The splitter follows the event-stream format of the WHATWG HTML standard, section 9.2.6, apart from two points: an
event is stamped when its last data line was complete, not when the blank line after it came, and data lines that were
complete when the stream ended are not thrown away.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["token", "finish", "role", "usage", "done", "error", "other"]

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_LARGEST = 2**53 - 1
"""The largest integer that every reader of JSON keeps exactly (RFC 8259, section 6)."""


@dataclass(frozen=True)
class RawEvent:
    """One event as it came: its type, its data, and the read that brought the end of the data.

    `time` is when that read was, and `lag` how long its bytes had lain unread by then, s, NaN where it is not known.
    """

    time: float
    name: str
    data: bytes
    lag: float = math.nan


class Splitter:
    """Splits the bytes of an event stream, fed in pieces of any size, into events."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._first = True
        self._data: list[bytes] = []
        self._name = ""
        self._read = (0.0, math.nan)

    def feed(self, time: float, lag: float, piece: bytes) -> list[RawEvent]:
        """Take a piece that was read at `time`, `lag` seconds after it had come; return the events it completed."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        events = []
        for line in lines:
            if event := self._take(time, lag, line):
                events.append(event)
        return events

    def close(self) -> list[RawEvent]:
        """Return the event whose data lines were complete when the stream ended without a blank line."""
        event = self._dispatch()
        return [event] if event else []

    def _take(self, time: float, lag: float, line: bytes) -> RawEvent | None:
        if self._first:
            line = line.removeprefix(_BOM)
            self._first = False
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._read = (time, lag)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> RawEvent | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        time, lag = self._read
        return RawEvent(time, name, b"\n".join(data), lag) if data else None


def split(reads: Iterable[tuple[float, float, bytes]]) -> list[RawEvent]:
    """Return the events of a whole stream, given as (time, lag, bytes) in the order they were read."""
    splitter = Splitter()
    events = [event for time, lag, piece in reads for event in splitter.feed(time, lag, piece)]
    return events + splitter.close()


@dataclass(frozen=True)
class Event:
    """What one event of an OpenAI-style stream says; None where it says nothing.

    `time` and `lag` are those of the raw event; `tokens` is the number of completion tokens so far, by continuous
    usage.
    """

    time: float
    kind: Kind
    text: str = ""
    tokens: int | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None
    error: str | None = None
    lag: float = math.nan


def classify(raw: RawEvent) -> Event:
    """Return what an event of a chat or completions stream says.

    Token-bearing is an event with a non-empty `content`, `reasoning_content`, `reasoning` or `tool_calls` in a delta
    (chat), or `text` (completions), whatever else it carries. A part of an unexpected type says nothing, and an event
    that says nothing is `other`: no payload makes this raise.
    """
    if raw.data.strip() == b"[DONE]":
        return Event(raw.time, "done", lag=raw.lag)
    payload = parse(raw.data)
    if error := error_message(payload, raw.name):
        return Event(raw.time, "error", error=error, lag=raw.lag)

    choices = _objects(payload.get("choices"))
    deltas = [_object(choice.get("delta")) for choice in choices]
    text = "".join(
        _delta_text(delta) + _text(choice.get("text")) for choice, delta in zip(choices, deltas, strict=True)
    )
    bears_tokens = bool(text) or any(_objects(delta.get("tool_calls")) for delta in deltas)
    finish_reason = next((_reason(choice["finish_reason"]) for choice in choices if choice.get("finish_reason")), None)
    usage = _object(payload.get("usage")) or None
    spec = _spec(payload, choices)

    kind: Kind = "other"
    if bears_tokens:
        kind = "token"
    elif finish_reason:
        kind = "finish"
    elif usage and not choices:
        kind = "usage"
    elif any(delta.get("role") for delta in deltas):
        kind = "role"
    tokens = integer(usage, "completion_tokens")
    return Event(raw.time, kind, text, tokens, finish_reason, usage, spec, lag=raw.lag)


def _spec(payload: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The details of speculation: those of the OpenAI routes, else SGLang's meta_info, of the whole or of a choice."""
    if found := _object(_object(payload.get("sglext")).get("spec_tokens_details")):
        return found
    infos = (_object(one["meta_info"]) for one in (payload, *choices) if "meta_info" in one)
    return next((info for info in infos if any(name.startswith("spec_") for name in info)), None)


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, an empty one where it holds anything else."""
    try:
        return _object(json.loads(data))
    except (ValueError, RecursionError):
        return {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; nothing when it is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    """A string as UTF-8 can hold it: JSON may escape half of a surrogate pair. Empty when it is no string."""
    return _LONE_SURROGATE.sub("\ufffd", value) if isinstance(value, str) else ""


def _reason(value: Any) -> str:
    """A finish_reason as text; SGLang's own API has objects such as {"type": "abort", "message": ...}."""
    return _text(value) or _text(_object(value).get("type")) or json.dumps(value)


def _delta_text(delta: dict[str, Any]) -> str:
    """The text of a chat delta; servers that rename reasoning_content send it under both names for a while."""
    parts = [_text(delta.get("reasoning_content")) or _text(delta.get("reasoning")), _text(delta.get("content"))]
    for call in _objects(delta.get("tool_calls")):
        function = _object(call.get("function"))
        parts += [_text(function.get("name")), _text(function.get("arguments"))]
    return "".join(parts)


def error_message(payload: dict[str, Any], name: str = "") -> str | None:
    """Return the message of an error object, in any of the forms that servers send, or None if it is none."""
    error = payload.get("error")
    if not error and (name == "error" or payload.get("object") == "error"):
        error = payload
    if not error:
        return None
    if isinstance(error, dict):
        return _text(error.get("message")) or json.dumps(error)
    return _text(error) or json.dumps(error)


def integer(fields: Any, name: str) -> int | None:
    """Return the count in a field of an object; None where either is absent, null or something else."""
    return count(_object(fields).get(name))


def count(value: Any) -> int | None:
    """Return a value that is a count, an integer from 0 to 2^53 - 1; None for anything else."""
    return value if type(value) is int and 0 <= value <= _LARGEST else None
