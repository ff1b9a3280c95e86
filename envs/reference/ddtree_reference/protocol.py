"""The OpenAI-style requests that the server accepts: their fields, their limits, and what is refused."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from typing_extensions import TypeAliasType

DEFAULT_MAX_TOKENS = 128
DEFAULT_TEMPERATURE = 1.0  # OpenAI's and SGLang's
GREEDY_BELOW = 1e-6  # a temperature under this is 0, as SGLang has it: logits divided by it would overflow
MAX_BODY_BYTES = 2**20  # parsed on the event loop, while which no stream goes on
MAX_CHOICES = 16
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_TEMPERATURE = 100.0
MAX_TOP_LOGPROBS = 20
SHOWN_PROBLEMS = 5

# Fields of OpenAI's, SGLang's and vLLM's requests that would change an answer, each with the values that leave it as it
# is; null always does. What stands neither here nor in the models below (user, metadata, ...) has no say in the answer.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
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
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_meta_info": (False,),
    "truncate_prompt_tokens": (),
    "input_ids": (),
    "session_params": (),
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
    """An error a client caused, or should see: HTTP status, type and message, and the seconds after which to retry."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.retry_after = retry_after


# Lists whose check ends at the first wrong item: a million of them would keep the event loop busy for seconds.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])


class StreamOptions(BaseModel):
    """What a stream says about usage: in an event of its own at the end, and in every event."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateRequest(BaseModel):
    """What both endpoints take; null is the default. `check_supported` looks at the fields beyond these."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_COUNT)
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | Texts | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_spec_tokens_details: bool | None = None

    def check_supported(self) -> None:
        """Raise ApiError for a field that would change the answer and that this server does not have."""
        for name, value in (self.model_extra or {}).items():
            off = UNSUPPORTED.get(name)
            if off is None or value is None or any(_same(value, harmless) for harmless in off):
                continue
            remedy = "leave it out" + "".join(f" or send {json.dumps(harmless)}" for harmless in off)
            raise ApiError(400, f"{name}: {reprlib.repr(value)} is not supported here; {remedy}")

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
    def wanted_tokens(self) -> int | None:
        """Tokens to generate at most; None if the request leaves it to the server."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return self.n or 1

    @property
    def top_logprobs_wanted(self) -> int | None:
        """None: no log probabilities; k: those of the answer's tokens, and of the k likeliest beside each."""
        raise NotImplementedError

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with a usage event; spec details travel on it."""
        return bool(self.stream_options and self.stream_options.include_usage) or bool(self.return_spec_tokens_details)

    @property
    def usage_always(self) -> bool:
        """Whether every event of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class TextPart(BaseModel):
    """A piece of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


TextParts = TypeAliasType("TextParts", Annotated[list[TextPart], FailFast()])


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | TextParts | None

    @property
    def text(self) -> str:
        """The content as one string; that of a message without any is empty."""
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerateRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def top_logprobs_wanted(self) -> int | None:
        """As for every request. Raises ApiError for `top_logprobs` without `logprobs`."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ApiError(400, f"top_logprobs: {self.top_logprobs} is asked for without logprobs; send logprobs: true")
        return None


class CompletionRequest(GenerateRequest):
    """Body of /v1/completions; a prompt is text or token ids."""

    prompt: str | TokenIds
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def top_logprobs_wanted(self) -> int | None:
        """As for every request."""
        return self.logprobs


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)


def parse(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """The request in a body of JSON. Raises ApiError for JSON that is malformed, and for fields that are wrong."""
    try:
        request = kind.model_validate(json.loads(body.decode(), parse_constant=_refuse_constant))
        request.check_supported()
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise ApiError(400, "; ".join(_problem(detail) for detail in details[:SHOWN_PROBLEMS])) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: no UTF-8 at byte {error.start}; send JSON as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"body: malformed JSON at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise ApiError(400, "body: nested too deep; no field needs more than a few levels") from None
    except ValueError as error:  # an integer of thousands of digits, NaN
        raise ApiError(400, f"body: {error}") from None
    return request


def check_unicode(name: str, text: str) -> None:
    """Raise ApiError if `text` holds half of a surrogate pair, which JSON's \\u can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} alone at character {error.start}"
        raise ApiError(400, f"{name} is not valid Unicode: {found}; send surrogates in pairs") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON; send a number or null")


def _same(value: Any, harmless: Any) -> bool:
    """Whether a JSON value is `harmless`; false is not 0 and true is not 1."""
    return bool(value == harmless) and isinstance(value, bool) == isinstance(harmless, bool)


def _problem(detail: Mapping[str, Any]) -> str:
    """One validation error as text: the field, what is wrong with it, and what it was."""
    field = ".".join(str(part) for part in detail["loc"]) or "body"
    found = "" if detail["type"] == "missing" else f", got {reprlib.repr(detail['input'])}"
    return f"{field}: {detail['msg']}{found}"
