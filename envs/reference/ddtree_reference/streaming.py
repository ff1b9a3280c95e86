"""How a request in flight is answered: as server-sent events, or whole. Either way, a client that goes cancels it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ddtree_reference import responses
from ddtree_reference.answer import FinishReason, Update
from ddtree_reference.exchange import ClientGone, Exchange, InFlight
from ddtree_reference.logprobs import LogprobForm
from ddtree_reference.protocol import ApiError, GenerateRequest
from ddtree_reference.responses import Choice, Envelope
from ddtree_reference.tokenizer import Tokenizer

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass
class _Spoken:
    """What one choice has said so far. `form` is None if no log probabilities are asked for."""

    form: LogprobForm | None
    pieces: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    spec: dict[str, Any] | None = None
    cached_tokens: int = 0
    silent: bool = True

    def hear(self, update: Update) -> dict[str, Any] | None:
        """Note an update; return its log probabilities in the endpoint's form."""
        self.cached_tokens = max(self.cached_tokens, update.cached_tokens)
        if update.last:
            self.finish_reason, self.spec = update.finish_reason, update.spec
        return self.form.of(update.logprobs) if self.form is not None and update.logprobs else None


class Reply:
    """What the client of a request is told, by the news of its exchange."""

    def __init__(self, request: GenerateRequest, exchange: Exchange, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self.exchange = exchange
        self._request = request
        self._envelope = envelope
        with_logprobs = request.top_logprobs_wanted is not None
        self._choices = [
            _Spoken(LogprobForm(tokenizer, envelope.chat) if with_logprobs else None) for _ in exchange.jobs
        ]

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream: one for each update, usage if asked for, [DONE]. An error ends it."""
        try:
            unfinished = len(self._choices)
            while unfinished:
                index, update = await self.exchange.news()
                choice = self._choices[index]
                logprobs = choice.hear(update)
                yield self._envelope.event(
                    index,
                    update.text,
                    update.finish_reason,
                    first=choice.silent,
                    logprobs=logprobs,
                    usage=self._usage() if self._request.usage_always else None,
                )
                choice.silent = False
                unfinished -= update.last
            if self._request.usage_at_end:
                yield self._envelope.closing_event(usage=self._usage(), **self._spec())
        except ApiError as error:
            yield responses.error_event(error.message, error.kind, error.status)
        yield responses.DONE

    async def body(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError if the request fails, ClientGone if nobody waits for it any more."""
        unfinished = len(self._choices)
        while unfinished:
            index, update = await self.exchange.news()
            choice = self._choices[index]
            choice.pieces.append(update.text)
            for name, values in (choice.hear(update) or {}).items():
                choice.logprobs.setdefault(name, []).extend(values)
            unfinished -= update.last
        choices = [
            Choice("".join(choice.pieces), choice.finish_reason, choice.logprobs or None) for choice in self._choices
        ]
        return self._envelope.body(choices, usage=self._usage(), **self._spec())

    def _usage(self) -> dict[str, Any]:
        """Usage so far: the prompt once, the tokens of all choices."""
        prompt_tokens = len(self.exchange.jobs[0].prompt)
        return responses.usage(prompt_tokens, self.exchange.completion_tokens, self._choices[0].cached_tokens)

    def _spec(self) -> dict[str, Any]:
        """The field with the details of speculation, if asked for: of the one choice, or of all in a list."""
        if not self._request.return_spec_tokens_details:
            return {}
        details = [choice.spec for choice in self._choices]
        return {"sglext": {"spec_tokens_details": details[0] if len(details) == 1 else details}}


class EventStream(Response):
    """Sends a reply's events as they come, until the last one or until the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, in_flight: InFlight) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._reply = reply
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer over ASGI."""
        exchange = self._reply.exchange
        with self._in_flight.answering(exchange), contextlib.suppress(ClientGone):
            async with _listening(exchange, receive):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in self._reply.events():
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def whole(reply: Reply, in_flight: InFlight, receive: Receive) -> Response:
    """The whole answer as a response. Raises ApiError if the request fails."""
    exchange = reply.exchange
    with in_flight.answering(exchange):
        async with _listening(exchange, receive):
            try:
                return JSONResponse(await reply.body())
            except ClientGone:
                return Response(status_code=400)  # nobody reads it


@contextlib.asynccontextmanager
async def _listening(exchange: Exchange, receive: Receive) -> AsyncIterator[None]:
    """Tell the exchange, while inside, when the client closes the connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.interrupt(ClientGone())

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
