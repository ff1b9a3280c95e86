"""The HTTP server: OpenAI's endpoints, and server-info under SGLang's names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ddtree_reference import __version__, protocol, tokenizer
from ddtree_reference.decode import Method
from ddtree_reference.protocol import Answer, ApiError, ChatRequest, CompletionRequest, GenerateRequest
from ddtree_reference.startup import Opened
from ddtree_reference.worker import Job, Update, Worker

log = logging.getLogger("ddtree_reference")


@dataclass(frozen=True)
class Service:
    """A loaded engine as it is served: what the endpoints need."""

    opened: Opened
    worker: Worker
    served_model_name: str
    max_running_requests: int
    threads: int
    start_id: str
    load_seconds: float

    @property
    def method(self) -> Method:
        """The method every request is decoded with."""
        return self.worker.method


def server_info(service: Service) -> dict[str, Any]:
    """The body of /server_info."""
    method, opened = service.method, service.opened
    speculative, is_tree = method.algorithm != "AR", method.algorithm == "DDTREE"
    counters = service.worker.snapshot()
    rounds, accepted = counters["verify_calls_total"], counters["accepted_drafts_total"]
    return {
        "version": __version__,
        "model_path": str(opened.model_path),
        "served_model_name": service.served_model_name,
        "speculative_algorithm": method.algorithm if speculative else None,
        "speculative_ddtree_budget": method.budget if is_tree else None,
        "speculative_ddtree_topk_cap": method.effective_cap if is_tree else None,
        "speculative_dflash_block_size": method.block_size if speculative else None,
        "speculative_num_draft_tokens": method.verify_width if speculative else None,
        "max_running_requests": service.max_running_requests,
        "max_context": opened.engine.target.config.max_context,
        "threads": service.threads,
        "numerics": opened.engine.target.numerics,
        "bit_exact": opened.self_test.passed,
        "self_test": asdict(opened.self_test),
        "pid": os.getpid(),
        "start_id": service.start_id,
        "load_seconds": service.load_seconds,
        "internal_states": [{"avg_spec_accept_length": (rounds + accepted) / rounds if rounds else None}],
        "counters": counters,
    }


def create_app(service: Service) -> FastAPI:
    """The application; its lifespan runs the engine thread."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.stop)

    app = FastAPI(title="ddtree-reference", version=__version__, lifespan=lifespan)
    _handle_errors(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        _check_alive(service)
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        max_context = service.opened.engine.target.config.max_context
        card = {"id": service.served_model_name, "object": "model", "created": 0, "owned_by": "ddtree-reference"}
        return {"object": "list", "data": [card | {"max_model_len": max_context}]}

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        return server_info(service)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> dict[str, Any]:
        return {"success": True, "message": "there is no prefix cache: every prompt is computed anew"}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        prompt = tokenizer.render_chat(service.opened.tokenizer, messages)
        return await _answer(service, body, request, prompt, _encode(service, prompt))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        words = service.opened.tokenizer
        if isinstance(body.prompt, str):
            return await _answer(service, body, request, body.prompt, _encode(service, body.prompt))
        vocab_size = service.opened.engine.target.config.vocab_size
        if not all(0 <= token < vocab_size for token in body.prompt):
            raise ApiError(400, f"prompt: token ids must be in 0..{vocab_size - 1}")
        return await _answer(service, body, request, tokenizer.decode(words, body.prompt), body.prompt)

    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's form."""

    def respond(message: str, kind: str, status: int) -> JSONResponse:
        return JSONResponse(protocol.error_body(message, kind, status), status)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return respond(error.message, error.kind, error.status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return respond("; ".join(_problem(detail) for detail in error.errors()), "invalid_request_error", 400)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return respond(str(error.detail), "invalid_request_error", error.status_code)

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> JSONResponse:
        return respond(f"{type(error).__name__}: {error}", "internal_error", 500)


def _problem(detail: dict[str, Any]) -> str:
    """One validation error as text: the field and what is wrong with it."""
    if detail["type"] == "json_invalid":
        return f"body: malformed JSON at character {detail['loc'][-1]}: {detail['ctx']['error']}"
    return f"{'.'.join(str(part) for part in detail['loc'][1:]) or 'body'}: {detail['msg']}"


async def _answer(
    service: Service, body: GenerateRequest, request: Request, prompt_text: str, prompt: list[int]
) -> Response:
    """Check a request, queue it, and answer whole or as a stream."""
    answer = protocol.new_answer(isinstance(body, ChatRequest), service.served_model_name)
    loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()

    def emit(update: Update) -> None:
        loop.call_soon_threadsafe(updates.put_nowait, update)

    job = Job(
        prompt_text=prompt_text,
        prompt=tuple(prompt),
        max_tokens=_check(service, body, prompt),
        eos=None if body.ignore_eos else service.opened.tokenizer.eos,
        stops=body.stops,
        emit=emit,
    )
    service.worker.submit(job)
    if body.stream:
        return StreamingResponse(_stream(job, updates, body, answer), media_type="text/event-stream")
    return await _whole(job, updates, body, answer, request)


def _check_alive(service: Service) -> None:
    """Raise ApiError if nothing would answer a request."""
    if not service.worker.alive:
        raise ApiError(503, "the engine thread has ended, see the server's log; restart the server", "internal_error")


def _encode(service: Service, text: str) -> list[int]:
    """Tokenize a prompt. One that is far too long is refused unread: it would hold up everybody's events."""
    words, max_context = service.opened.tokenizer, service.opened.engine.target.config.max_context
    if len(text) > words.longest * max_context:
        raise ApiError(400, f"a prompt of {len(text)} characters exceeds the maximum context of {max_context} tokens")
    protocol.check_unicode("prompt", text)
    return tokenizer.encode(words, text)


def _check(service: Service, body: GenerateRequest, prompt: list[int]) -> int:
    """The number of tokens to generate at most. Raises ApiError for what this server cannot do."""
    _check_alive(service)
    body.check_supported()
    if body.model is not None and body.model != service.served_model_name:
        raise ApiError(404, f"model {body.model!r} is not served here; the one that is: {service.served_model_name!r}")
    if body.temperature != 0:
        raise ApiError(400, f"temperature {body.temperature}: this server decodes greedily, send temperature 0")
    if not prompt:
        raise ApiError(400, "prompt: it must hold at least one token")
    max_context = service.opened.engine.target.config.max_context
    room = max_context - len(prompt)
    wanted = body.max_completion_tokens or body.max_tokens or max(1, min(room, protocol.DEFAULT_MAX_TOKENS))
    if wanted > room:
        raise ApiError(
            400, f"{len(prompt)} prompt tokens + max_tokens {wanted} exceed the maximum context of {max_context} tokens"
        )
    return wanted


async def _stream(
    job: Job, updates: asyncio.Queue[Update], body: GenerateRequest, answer: Answer
) -> AsyncIterator[bytes]:
    """Server-sent events: one for each round with text, usage if asked for, [DONE]."""
    first = True
    try:
        while True:
            update = await updates.get()
            if update.error is not None:
                yield _sse(protocol.error_body(update.error, "internal_error", 500))
                break
            usage = protocol.usage(len(job.prompt), update.completion_tokens)
            more = {"usage": usage} if body.usage_always else {}
            yield _sse(answer.event(update.text, update.finish_reason, first, **more))
            first = False
            if update.last:
                if body.usage_at_end:
                    yield _sse(answer.closing_event(usage=usage, **_spec(body, update)))
                break
        yield b"data: [DONE]\n\n"
    finally:
        job.cancelled.set()


async def _whole(
    job: Job, updates: asyncio.Queue[Update], body: GenerateRequest, answer: Answer, request: Request
) -> Response:
    """The whole answer, or nothing if the client has gone meanwhile."""
    finished, gone = asyncio.create_task(_collect(updates)), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            return Response(status_code=499)
        text, last = finished.result()
    finally:
        job.cancelled.set()
        finished.cancel()
        gone.cancel()
    if last.error is not None:
        raise ApiError(500, last.error, "internal_error")
    usage = protocol.usage(len(job.prompt), last.completion_tokens)
    return JSONResponse(answer.body(text, last.finish_reason, usage=usage, **_spec(body, last)))


async def _collect(updates: asyncio.Queue[Update]) -> tuple[str, Update]:
    """All text of an answer and its last update."""
    pieces = []
    while True:
        update = await updates.get()
        pieces.append(update.text)
        if update.last:
            return "".join(pieces), update


async def _disconnect(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _spec(body: GenerateRequest, update: Update) -> dict[str, Any]:
    return {"sglext": {"spec_tokens_details": update.spec}} if body.return_spec_tokens_details else {}


def _sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def check_port(host: str, port: int) -> None:
    """Raise OSError, before anything is loaded, if the server could not listen there."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(f"host {host}, port {port}: {error.strerror}; choose another --port") from error


def run(service: Service, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; open connections get a second to end."""
    log.info("serving %s on http://%s:%d", service.served_model_name, host, port)
    uvicorn.run(
        create_app(service), host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
