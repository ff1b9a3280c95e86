"""Reads the files of faults/: what a server plays, how it is asked, and the right values.

A file has these keys; all but `title`, `elsewhere` and `right` may be missing.

* `kind`: the number of the fault in the list of kinds, none for what only concerns the wire.
* `title`, and `elsewhere`: what well-known tools show instead.
* `requests`, `concurrency`, `max_tokens`, `admits` (requests that the server runs at once), `limits` (of time, s).
* `endpoints`, `framings`, `packets`: where it makes sense; all of them unless said.
* `answers`: the n-th request is given the n-th, and the last when there are no more. An answer is a list of events or
  an object with `events` and fields of scripted_server.Script (bytes as text, `end_ms`, `line_end`).
* `right`: `requests` (a list by request, of columns of the raw rows or of the request metrics), `cell` (of the cell
  metrics) and `document` (of metrics.json, by dotted path); `timed` holds the same three for values that are those of
  the schedule, and are held only where each event is a packet; `sent` is what each request must have asked for,
  `server_load` is of the server's samples, `connections` how many the client made, `within_s` the longest a cell takes.
* `tests`: tests elsewhere that show the fault, or the part of it that no transcript can.

An event has `after_ms`, the pause before it, `repeat`, how often it is sent, and one of: `text`, `reasoning`,
`reasoning_content`, `tool`, `role` or `finish` (which may be together), `usage_event`, `error`, `json` (any payload),
`done`, `comment`, `raw` (bytes as text). `tokens: n` says that it carries n tokens more: then it has continuous usage.
`usage` is its usage as it is; `usage_event: true` tells the tokens so far, a number tells that number; `spec`, `cached`
and `prompt` go with it. `name` and `id` are fields of the event stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from scripted_server import Framing, Packets, Script, usage

FOLDER = Path(__file__).with_name("faults")
ENDPOINTS = ("chat", "completions")
FRAMINGS: tuple[str, ...] = get_args(Framing)
PACKETS: tuple[str, ...] = get_args(Packets)

_OF_EVENTS = {
    *("after_ms", "repeat", "text", "reasoning", "reasoning_content", "tool", "role", "finish", "tokens", "usage"),
    *("usage_event", "spec", "cached", "prompt", "error", "json", "done", "comment", "raw", "name", "id"),
}
_BYTES = ("extension", "trailers", "trailing")


@dataclass(frozen=True)
class Played:
    """A piece of a transcript: the pause before it (s), its bytes, and whether it is exactly one event."""

    pause: float
    piece: bytes
    is_event: bool


@dataclass(frozen=True)
class Fault:
    """One file of faults/, as the module's text describes it."""

    name: str
    title: str
    elsewhere: str
    right: Mapping[str, Any]
    kind: int | None = None
    answers: Sequence[Any] = ()
    requests: int | None = None
    concurrency: int = 1
    max_tokens: int = 64
    admits: int = 1000
    limits: Mapping[str, float] = field(default_factory=dict)
    endpoints: Sequence[str] = ENDPOINTS
    framings: Sequence[str] = FRAMINGS
    packets: Sequence[str] = PACKETS
    tests: Sequence[str] = ()

    @property
    def n(self) -> int:
        """Requests that are sent."""
        return self.requests or len(self.answers)

    def scripts(self, endpoint: str, framing: Any, packets: Any) -> list[Script]:
        """One script a request."""
        answers = [*self.answers, *[self.answers[-1]] * (self.n - len(self.answers))]
        return [_script(answer, endpoint, framing, packets) for answer in answers]

    def is_event(self, endpoint: str) -> list[list[bool]]:
        """By request, which pieces are one event each."""
        return [[one.is_event for one in _transcript(_as_object(a), endpoint)] for a in self.answers]


def read_all() -> list[Fault]:
    """All files, by name. Raises TypeError for a key that is unknown."""
    return [Fault(name=path.stem, **yaml.safe_load(path.read_text("utf-8"))) for path in sorted(FOLDER.glob("*.yaml"))]


def _as_object(answer: Any) -> dict[str, Any]:
    return {"events": answer} if isinstance(answer, list) else dict(answer)


def _script(answer: Any, endpoint: str, framing: Any, packets: Any) -> Script:
    fields = _as_object(answer)
    pieces = [(one.pause, one.piece) for one in _transcript(fields, endpoint)]
    fields = {name: value for name, value in fields.items() if name not in ("events", "line_end")}
    fields |= {name: _bytes(fields[name]) for name in _BYTES if name in fields}
    return Script(pieces, framing=framing, packets=packets, end_pause=fields.pop("end_ms", 0) / 1000, **fields)


def _transcript(answer: Mapping[str, Any], endpoint: str) -> Iterator[Played]:
    so_far = 0
    line_end = answer.get("line_end", "\n").encode()
    for given in answer["events"]:
        step = {"done": True} if given == "done" else given
        if unknown := set(step) - _OF_EVENTS:
            raise TypeError(f"unknown in an event: {sorted(unknown)}")
        for _ in range(step.get("repeat", 1)):
            so_far += step.get("tokens", 0)
            piece = _piece(step, endpoint, so_far, line_end)
            if piece is not None:
                is_event = not {"raw", "comment"} & set(step)
                yield Played(step.get("after_ms", 0) / 1000, piece, is_event)


def _piece(step: Mapping[str, Any], endpoint: str, so_far: int, line_end: bytes) -> bytes | None:
    """The bytes of one step; None where the endpoint has no such event."""
    if "raw" in step:
        return _bytes(step["raw"])
    if "comment" in step:
        return f": {step['comment']}".encode() + line_end * 2
    if step.get("role") and endpoint == "completions":
        return None
    data = "[DONE]" if "done" in step else json.dumps(_payload(step, endpoint, so_far), ensure_ascii=False)
    fields = [("event", step.get("name")), ("id", step.get("id")), ("data", data)]
    lines = [f"{name}: {value}".encode() for name, value in fields if value is not None]
    return line_end.join([*lines, b"", b""])


def _payload(step: Mapping[str, Any], endpoint: str, so_far: int) -> Any:
    if "json" in step:
        return step["json"]
    if "error" in step:
        return {"error": step["error"]}
    told = step.get("usage_event", True)
    counts = usage(so_far if told is True else told, step.get("prompt", 5), step.get("cached"))
    payload: dict[str, Any] = {"id": "r", "choices": [] if "usage_event" in step else [_choice(step, endpoint)]}
    if "usage_event" in step or "tokens" in step:
        payload["usage"] = counts
    if "usage" in step:
        payload["usage"] = step["usage"]
    return payload | ({"sglext": {"spec_tokens_details": step["spec"]}} if "spec" in step else {})


def _choice(step: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    end = {"index": 0, "finish_reason": step.get("finish")}
    if endpoint == "completions":
        return {"text": step.get("text", "")} | end
    delta: dict[str, Any] = {"role": "assistant", "content": ""} if step.get("role") else {}
    delta |= {"content": step["text"]} if "text" in step else {}
    delta |= {name: step[name] for name in ("reasoning", "reasoning_content") if name in step}
    if "tool" in step:
        delta["tool_calls"] = [{"index": 0, "function": {"arguments": step["tool"]}}]
    return {"delta": delta} | end


def _bytes(text: str) -> bytes:
    """Text as UTF-8; U+DC80 to U+DCFF stand for the bytes 80 to FF that no UTF-8 has."""
    return text.encode("utf-8", "surrogateescape")
