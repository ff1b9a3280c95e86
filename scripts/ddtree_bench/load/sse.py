"""Server-sent events: from the bytes of a stream to events, and from an event to what it says.

The splitter follows the event-stream format of the WHATWG HTML standard, section 9.2.6, apart from two points: an
event is stamped when its last data line was complete, not when the blank line after it came, and data lines that were
complete when the stream ended are not thrown away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["token", "finish", "role", "usage", "done", "error", "other"]

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawEvent:
    """One event as it came: when the bytes that completed its data were read, its type and its data."""

    time: float
    name: str
    data: bytes


class Splitter:
    """Splits the bytes of an event stream, fed in pieces of any size, into events."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._first = True
        self._data: list[bytes] = []
        self._name = ""
        self._time = 0.0

    def feed(self, time: float, piece: bytes) -> list[RawEvent]:
        """Take a piece that was read at `time`; return the events that it completed."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        events = []
        for line in lines:
            if event := self._take(time, line):
                events.append(event)
        return events

    def close(self) -> list[RawEvent]:
        """Return the event whose data lines were complete when the stream ended without a blank line."""
        event = self._dispatch()
        return [event] if event else []

    def _take(self, time: float, line: bytes) -> RawEvent | None:
        if self._first:
            line = line.removeprefix(_BOM)
            self._first = False
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._time = time
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> RawEvent | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return RawEvent(self._time, name, b"\n".join(data)) if data else None


def split(reads: Iterable[tuple[float, bytes]]) -> list[RawEvent]:
    """Return the events of a whole stream, given as (time, bytes) in the order they were read."""
    splitter = Splitter()
    events = [event for time, piece in reads for event in splitter.feed(time, piece)]
    return events + splitter.close()


@dataclass(frozen=True)
class Event:
    """What one event of an OpenAI-style stream says; None where it says nothing.

    `tokens` is the number of completion tokens so far, by continuous usage.
    """

    time: float
    kind: Kind
    text: str = ""
    tokens: int | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None
    error: str | None = None


def classify(raw: RawEvent) -> Event:
    """Return what an event of a chat or completions stream says.

    Token-bearing is an event with a non-empty `content`, `reasoning_content`, `reasoning` or `tool_calls` in a delta
    (chat), or `text` (completions), whatever else it carries.
    """
    if raw.data.strip() == b"[DONE]":
        return Event(raw.time, "done")
    try:
        payload = json.loads(raw.data)
    except ValueError:
        return Event(raw.time, "other")
    if not isinstance(payload, dict):
        return Event(raw.time, "other")
    if error := error_message(payload, raw.name):
        return Event(raw.time, "error", error=error)

    choices = [choice for choice in payload.get("choices") or [] if isinstance(choice, dict)]
    deltas = [choice.get("delta") or {} for choice in choices]
    text = "".join(
        _delta_text(delta) + (choice.get("text") or "") for choice, delta in zip(choices, deltas, strict=True)
    )
    bears_tokens = bool(text) or any(delta.get("tool_calls") for delta in deltas)
    finish_reason = next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None)
    usage = payload.get("usage") or None
    spec = (payload.get("sglext") or {}).get("spec_tokens_details")

    kind: Kind = "other"
    if bears_tokens:
        kind = "token"
    elif finish_reason:
        kind = "finish"
    elif usage and not choices:
        kind = "usage"
    elif any(delta.get("role") for delta in deltas):
        kind = "role"
    return Event(raw.time, kind, text, integer(usage, "completion_tokens"), finish_reason, usage, spec)


def _delta_text(delta: dict[str, Any]) -> str:
    """The text of a chat delta; servers that rename reasoning_content send it under both names for a while."""
    parts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def error_message(payload: dict[str, Any], name: str = "") -> str | None:
    """Return the message of an error object, in any of the forms that servers send, or None if it is none."""
    error = payload.get("error")
    if not error and (name == "error" or payload.get("object") == "error"):
        error = payload
    if not error:
        return None
    if isinstance(error, dict):
        return str(error.get("message") or json.dumps(error))
    return str(error)


def integer(fields: dict[str, Any] | None, name: str) -> int | None:
    """Return an integer field, or None where it is absent, null or something else."""
    value = (fields or {}).get(name)
    return value if type(value) is int else None
