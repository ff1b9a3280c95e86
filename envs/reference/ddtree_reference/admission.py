"""From a request to jobs for the engine: the prompt, its limits, and the sampling of each choice."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial

from ddtree_reference import protocol, tokenizer
from ddtree_reference.exchange import MakeJob
from ddtree_reference.protocol import ApiError, ChatRequest, CompletionRequest, GenerateRequest
from ddtree_reference.sampling import Sampling
from ddtree_reference.service import Service
from ddtree_reference.worker import Job


@dataclass(frozen=True)
class Prompt:
    """What is to be continued."""

    text: str
    tokens: tuple[int, ...]


def chat_prompt(service: Service, request: ChatRequest) -> Prompt:
    """The prompt of a conversation. Raises ApiError for one that cannot fit in the context or is no Unicode."""
    if len(request.messages) > service.max_context:
        raise ApiError(400, f"messages: {len(request.messages)} of them exceed {_context(service)}; send fewer")
    messages = [{"role": message.role, "content": message.text} for message in request.messages]
    _check_length(service, sum(len(message["content"]) for message in messages))
    return _encode(service, tokenizer.render_chat(service.opened.tokenizer, messages))


def completion_prompt(service: Service, request: CompletionRequest) -> Prompt:
    """The prompt as it was given. Raises ApiError for one that cannot fit in the context, no Unicode, no token ids."""
    if isinstance(request.prompt, str):
        _check_length(service, len(request.prompt))
        return _encode(service, request.prompt)
    tokens = request.prompt
    if len(tokens) > service.max_context:
        raise ApiError(400, f"prompt: {len(tokens)} tokens exceed {_context(service)}; send fewer")
    if not all(0 <= token < service.vocab_size for token in tokens):
        raise ApiError(400, f"prompt: token ids must be in 0..{service.vocab_size - 1}")
    return Prompt(tokenizer.decode(service.opened.tokenizer, tokens), tuple(tokens))


def jobs_of(service: Service, request: GenerateRequest, prompt: Prompt) -> list[MakeJob]:
    """One job a choice, each still without its way back to the client.

    Their seeds follow each other, from the request's or a random one. Raises ApiError for what this server cannot do.
    """
    check_model(service, request.model)
    sampling = _sampling(service, request)
    job = partial(
        Job,
        prompt_text=prompt.text,
        prompt=prompt.tokens,
        max_tokens=_max_tokens(service, request, prompt),
        eos=None if request.ignore_eos else service.opened.tokenizer.eos,
        stops=request.stops,
        top_logprobs=request.top_logprobs_wanted,
    )
    return [partial(job, sampling=replace(sampling, seed=(sampling.seed + i) % 2**63)) for i in range(request.choices)]


def probe_job(service: Service) -> MakeJob:
    """The shortest work there is: one greedy token after one token."""
    token = service.opened.tokenizer.eos
    return partial(Job, prompt_text="", prompt=(token,), max_tokens=1, eos=None, stops=(), sampling=Sampling())


def check_model(service: Service, model: str | None) -> None:
    """Raise ApiError if `model` is not the one that is served."""
    if model is not None and model != service.served_model_name:
        raise ApiError(404, f"model {model!r:.80} is not served here; the one that is: {service.served_model_name!r}")


def _sampling(service: Service, request: GenerateRequest) -> Sampling:
    """Sampling of the first choice; limits that cut nothing are taken off."""
    temperature = protocol.DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
    top_k = request.top_k if request.top_k and 0 < request.top_k < service.vocab_size else -1
    return Sampling(
        temperature=0.0 if temperature < protocol.GREEDY_BELOW else temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=top_k,
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**63,
    )


def _max_tokens(service: Service, request: GenerateRequest, prompt: Prompt) -> int:
    """Tokens to generate at most. Raises ApiError if prompt and answer would not fit in the context."""
    if not prompt.tokens:
        raise ApiError(400, "prompt: it must hold at least one token")
    room = service.max_context - len(prompt.tokens)
    wanted = request.wanted_tokens or max(1, min(room, protocol.DEFAULT_MAX_TOKENS))
    if wanted > room:
        raise ApiError(
            400,
            f"{len(prompt.tokens)} prompt tokens + max_tokens {wanted} exceed {_context(service)}; "
            "send a shorter prompt or lower max_tokens",
        )
    return wanted


def _encode(service: Service, text: str) -> Prompt:
    protocol.check_unicode("prompt", text)
    return Prompt(text, tuple(tokenizer.encode(service.opened.tokenizer, text)))


def _check_length(service: Service, characters: int) -> None:
    """Refuse a prompt that is far too long unread: to tokenize it would hold up everybody's events."""
    if characters > service.opened.tokenizer.longest * service.max_context:
        raise ApiError(400, f"prompt: {characters} characters exceed {_context(service)}; send fewer")


def _context(service: Service) -> str:
    return f"the maximum context of {service.max_context} tokens"
