"""What the scripted server answers and when: the same regular stream to every request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_HEAD = (
    b"HTTP/1.1 200 OK\r\n"
    b"Content-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"
_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Schedule:
    """A regular stream: the first event `ttft_s` after the request was complete, then one every `interval_s`.

    `events` token-bearing events in all, each with `tokens_per_event` tokens; what ends the stream (finish_reason,
    usage, [DONE]) follows the last of them at once.
    """

    ttft_s: float = 0.1
    interval_s: float = 0.02
    events: int = 100
    tokens_per_event: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a schedule that cannot be kept."""
        for name in ("ttft_s", "interval_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)}; a time cannot be below 0 s")
        for name in ("events", "tokens_per_event"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; must be at least 1")

    @property
    def tokens(self) -> int:
        """Output tokens of one answer."""
        return self.events * self.tokens_per_event

    @property
    def e2e_s(self) -> float:
        """Time from a complete request to the end of its answer."""
        return self.ttft_s + (self.events - 1) * self.interval_s

    def parts(self) -> list[bytes]:
        """Return what is sent, head and framing included: one part an event, and at last the end of the stream."""
        texts = [_chunk(f"word{number:04d} " * self.tokens_per_event) for number in range(self.events)]
        parts = [
            _framed(_event(text | {"usage": self._usage((number + 1) * self.tokens_per_event)}))
            for number, text in enumerate(texts)
        ]
        parts[0] = _HEAD + _framed(_event(_chunk("", role="assistant"))) + parts[0]
        usage = _event(_payload([]) | {"usage": self._usage(self.tokens)})
        end = [_event(_chunk("", finish="length")), usage, b"data: [DONE]\n\n"]
        return [*parts, b"".join(_framed(one) for one in end) + _LAST_CHUNK]

    @staticmethod
    def _usage(tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": _PROMPT_TOKENS,
            "completion_tokens": tokens,
            "total_tokens": _PROMPT_TOKENS + tokens,
        }


def _payload(choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "calibration", "object": "chat.completion.chunk", "model": "calibration", "choices": choices}


def _chunk(text: str, role: str | None = None, finish: str | None = None) -> dict[str, Any]:
    delta = {"content": text} if role is None else {"role": role, "content": text}
    return _payload([{"index": 0, "delta": delta, "finish_reason": finish}])


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)
