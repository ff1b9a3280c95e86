"""The OpenAI-style requests that the server accepts, and the bodies it answers with."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddtree_reference.worker import FinishReason

DEFAULT_MAX_TOKENS = 128
MAX_STOPS = 16

# Fields of OpenAI's, SGLang's and vLLM's requests that would change an answer, each with the values that leave it as it
# is; null always does. What stands neither here nor in the models below (user, metadata, ...) has no say in the answer.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "stop_regex": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "structural_tag": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "custom_logit_processor": (),
    "logits_processors": ([],),
    "lora_path": (),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "modalities": (["text"],),
    "audio": (),
}


class ApiError(Exception):
    """An error a client caused, or should see: HTTP status, type and message."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind


class StreamOptions(BaseModel):
    """What a stream says about usage: in an event of its own at the end, and in every event."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateRequest(BaseModel):
    """What both endpoints take; `check_supported` looks at the fields beyond these."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_spec_tokens_details: bool = False

    def check_supported(self) -> None:
        """Raise ApiError for a field that would change the answer and that this server does not have."""
        for name, value in (self.model_extra or {}).items():
            off = UNSUPPORTED.get(name)
            if off is None or value is None or any(_same(value, harmless) for harmless in off):
                continue
            remedy = "leave it out" + "".join(f" or send {json.dumps(harmless)}" for harmless in off)
            raise ApiError(400, f"{name}: {value!r:.80} is not supported here; {remedy}")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises ApiError for ones that are empty or no Unicode, or too many."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS or "" in stops:
            raise ApiError(400, f"stop: give up to {MAX_STOPS} strings, none of them empty")
        for stop in stops:
            check_unicode("stop", stop)
        return stops

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with a usage event; spec details travel on it."""
        return bool(self.stream_options and self.stream_options.include_usage) or self.return_spec_tokens_details

    @property
    def usage_always(self) -> bool:
        """Whether every event of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class TextPart(BaseModel):
    """A piece of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerateRequest):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)


class CompletionRequest(GenerateRequest):
    """Body of /v1/completions; a prompt is text or token ids."""

    prompt: str | list[int]


def check_unicode(name: str, text: str) -> None:
    """Raise ApiError if `text` holds half of a surrogate pair, which JSON's \\u can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} alone at character {error.start}"
        raise ApiError(400, f"{name} is not valid Unicode: {found}; send surrogates in pairs") from error


def _same(value: Any, harmless: Any) -> bool:
    """Whether a JSON value is `harmless`; false is not 0 and true is not 1."""
    return bool(value == harmless) and isinstance(value, bool) == isinstance(harmless, bool)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The usage object; there is no prefix cache, so nothing of a prompt is ever cached."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """The body of an error, OpenAI's form."""
    return {"error": {"message": message, "type": kind, "code": code}}


@dataclass(frozen=True)
class Answer:
    """Identity of one answer; makes its bodies for the endpoint that was asked."""

    chat: bool
    model: str
    id: str
    created: int

    def body(self, text: str, finish_reason: FinishReason | None, **more: Any) -> dict[str, Any]:
        """The whole response of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return self._envelope([choice], "chat.completion" if self.chat else "text_completion", more)

    def event(self, text: str, finish_reason: FinishReason | None, first: bool, **more: Any) -> dict[str, Any]:
        """One event of a stream; the first one of a chat names the role."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        return self._envelope([choice], self._event_kind, more)

    def closing_event(self, **more: Any) -> dict[str, Any]:
        """The last event before [DONE]: no choices, but usage and the like."""
        return self._envelope([], self._event_kind, more)

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _envelope(self, choices: Sequence[dict[str, Any]], kind: str, more: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": list(choices)} | more


def new_answer(chat: bool, model: str) -> Answer:
    """An answer with a fresh id."""
    return Answer(chat, model, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()))
