"""What the server answers with: bodies, events of a stream, usage and errors, in OpenAI's forms."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddtree_reference.answer import FinishReason

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object; `cached_tokens` of the prompt came from the prefix cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(message: str, kind: str, code: int) -> bytes:
    """An error in the middle of a stream."""
    return b"data: " + _encode(error_body(message, kind, code)).encode("utf-8", "backslashreplace") + b"\n\n"


@dataclass(frozen=True)
class Choice:
    """One finished answer of a request. `logprobs` is in the endpoint's form, None if they were not asked for."""

    text: str
    finish_reason: FinishReason | None
    logprobs: dict[str, Any] | None


@dataclass(frozen=True)
class Envelope:
    """What all of one request's response has in common; makes its body or its events for the endpoint asked."""

    chat: bool
    model: str
    id: str
    created: int

    def body(self, choices: Sequence[Choice], **more: Any) -> dict[str, Any]:
        """The whole response of a request that does not stream."""
        envelope = self._envelope("chat.completion" if self.chat else "text_completion")
        return envelope | {"choices": [self._whole(index, choice) for index, choice in enumerate(choices)]} | more

    def event(
        self,
        index: int,
        text: str,
        finish_reason: FinishReason | None,
        *,
        first: bool,
        logprobs: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """One event of a stream, with news of one choice; the first one of a chat's choice names the role."""
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": logprobs}
        if not self.chat:
            choice["text"] = text
        elif first:
            choice["delta"] = {"role": "assistant", "content": text}
        else:
            choice["delta"] = {"content": text} if text else {}
        more = f',"usage":{_encode(usage)}' if usage else ""
        return f"{self._event_head}{_encode(choice)}]{more}}}\n\n".encode()

    def closing_event(self, **more: Any) -> bytes:
        """The last event before [DONE]: no choices, but usage and the like."""
        return f"{self._event_head}],{_encode(more)[1:]}\n\n".encode()

    @cached_property
    def _event_head(self) -> str:
        """Every event up to its first choice."""
        envelope = self._envelope("chat.completion.chunk" if self.chat else "text_completion")
        return f'data: {_encode(envelope)[:-1]},"choices":['

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": choice.text}} if self.chat else {"text": choice.text}
        return {"index": index, "finish_reason": choice.finish_reason, "logprobs": choice.logprobs} | said


def new_envelope(chat: bool, model: str) -> Envelope:
    """An envelope with a fresh id."""
    return Envelope(chat, model, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()))
