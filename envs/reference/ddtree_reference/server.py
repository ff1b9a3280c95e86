"""The HTTP server: OpenAI's endpoints, and what operators ask of a server, under SGLang's names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ddtree_reference import __version__, admission, prometheus, protocol, responses, service
from ddtree_reference.admission import Prompt
from ddtree_reference.exchange import InFlight
from ddtree_reference.prometheus import EngineCollector, Measured
from ddtree_reference.protocol import ApiError, ChatRequest, CompletionRequest, GenerateRequest
from ddtree_reference.service import Service
from ddtree_reference.streaming import EventStream, Reply, whole
from ddtree_reference.worker import QueueFull

GENERATE_SECONDS = 20.0  # that /health_generate waits, as SGLang does
PROBE_EVERY_SECONDS = 0.02
FAREWELL_SECONDS = 1  # for the last events of answers that are cut, and for connections to close
SIGNALS = (signal.SIGINT, signal.SIGTERM)
DRAIN_BYTES = 8 * protocol.MAX_BODY_BYTES  # of a body too large that are read before the connection is given up

log = logging.getLogger("ddtree_reference")


def create_app(served: Service) -> FastAPI:
    """The application; its lifespan runs the engine thread, `app.state.in_flight` holds the requests."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.worker.start()
        yield
        await asyncio.to_thread(served.worker.stop)

    registry = CollectorRegistry()
    measured = Measured(served.served_model_name, registry)
    collector = EngineCollector(served.served_model_name, served.worker.snapshot, lambda: measured.throughput.now)
    registry.register(collector)
    in_flight = InFlight(served.worker, measured)

    app = FastAPI(
        title="ddtree-reference",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # bodies are read by hand, so a schema would say nothing of them
        redirect_slashes=False,
    )
    app.state.in_flight = in_flight
    _answer_errors(app)
    _add_generation(app, served, in_flight)
    _add_health(app, served, in_flight)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return service.model_list(served)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        admission.check_model(served, name)
        return dict(service.model_list(served)["data"][0])

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def info() -> dict[str, Any]:
        return service.server_info(served, measured.throughput.last)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=prometheus.CONTENT_TYPE)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> dict[str, Any]:
        if served.worker.flush_cache():
            return {"success": True, "message": "the prefix cache is empty"}
        now = served.worker.snapshot()
        busy = f"{now['running_requests']} requests run and {now['queued_requests']} wait"
        raise ApiError(400, f"the prefix cache is in use: {busy}; flush it when none does")

    return app


def _add_generation(app: FastAPI, served: Service, in_flight: InFlight) -> None:
    """The endpoints that generate text."""

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = protocol.parse(await _read(http), ChatRequest)
        return await answer(http, request, admission.chat_prompt(served, request))

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = protocol.parse(await _read(http), CompletionRequest)
        return await answer(http, request, admission.completion_prompt(served, request))

    async def answer(http: Request, request: GenerateRequest, prompt: Prompt) -> Response:
        exchange = in_flight.begin(admission.jobs_of(served, request, prompt))
        envelope = responses.new_envelope(isinstance(request, ChatRequest), served.served_model_name)
        reply = Reply(request, exchange, envelope, served.opened.tokenizer)
        if request.stream:
            return EventStream(reply, in_flight)
        return await whole(reply, in_flight, http.receive)


def _add_health(app: FastAPI, served: Service, in_flight: InFlight) -> None:
    """The endpoints that tell whether requests would be answered."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        in_flight.check_open()
        return {"status": "ok"}

    @app.get("/health_generate")
    async def health_generate() -> dict[str, str]:
        in_flight.check_open()
        before = served.worker.snapshot()["generation_tokens_total"]
        answered = asyncio.Event()
        loop = asyncio.get_running_loop()
        probe = admission.probe_job(served)(emit=lambda _: loop.call_soon_threadsafe(answered.set))
        with contextlib.suppress(QueueFull):  # a full queue: whether others get tokens tells as much
            served.worker.submit(probe)
        deadline = loop.time() + GENERATE_SECONDS
        try:
            while not answered.is_set() and served.worker.snapshot()["generation_tokens_total"] == before:
                if loop.time() > deadline:
                    reason = f"no token was generated within {GENERATE_SECONDS:.0f} s, see the server's log"
                    raise ApiError(503, reason, "service_unavailable")
                await asyncio.sleep(PROBE_EVERY_SECONDS)
        finally:
            probe.cancelled.set()
        return {"status": "ok"}


def _answer_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's form."""

    def respond(message: str, kind: str, status: int, headers: dict[str, str] | None = None) -> Response:
        # pure ASCII: a message may quote what is no Unicode
        content = json.dumps(responses.error_body(message, kind, status))
        return Response(content, status, headers, media_type="application/json")

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        retry = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return respond(error.message, error.kind, error.status, retry)

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return respond(message, "invalid_request_error", error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> Response:
        return respond(f"{type(error).__name__}: {error}", "internal_error", 500)


async def _read(http: Request) -> bytes:
    """The body of a request. Raises ApiError if it is no JSON by its type, or too large."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type: {kind!r:.80} is not supported; send application/json")
    body, size = bytearray(), 0
    try:
        async for piece in http.stream():
            size += len(piece)
            if size <= protocol.MAX_BODY_BYTES:
                body += piece
            elif size > DRAIN_BYTES:
                break
    except ClientDisconnect:
        raise ApiError(400, "body: the connection was closed in the middle of it") from None
    if size > protocol.MAX_BODY_BYTES:  # what still came was read: a client that sends on does not see the answer
        raise ApiError(413, f"body: more than {protocol.MAX_BODY_BYTES} bytes; send less")
    return bytes(body)


class _Uvicorn(uvicorn.Server):
    """uvicorn without handlers of its own for signals: `_serve` has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def check_port(host: str, port: int) -> None:
    """Raise OSError, before anything is loaded, if the server could not listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"host {host}: {error.strerror}; choose another --host") from error
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(f"host {host}, port {port}: {error.strerror}; choose another --port") from error


def run(served: Service, host: str, port: int, shutdown_grace: float = 1.0) -> None:
    """Serve until SIGINT or SIGTERM.

    Then new requests are refused with status 503, and those in flight have `shutdown_grace` seconds to end before they
    are cut with an error. A second signal ends the process at once.
    """
    log.info("serving %s on http://%s:%d", served.served_model_name, host, port)
    app = create_app(served)
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=FAREWELL_SECONDS
    )
    asyncio.run(_serve(_Uvicorn(config), app.state.in_flight, shutdown_grace))


async def _serve(listener: uvicorn.Server, in_flight: InFlight, shutdown_grace: float) -> None:
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signalled.set)
    serving, waiting = asyncio.create_task(listener.serve()), asyncio.create_task(signalled.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if signalled.is_set():
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        await _drain(in_flight, shutdown_grace)
    waiting.cancel()
    listener.should_exit = True
    await serving


async def _drain(in_flight: InFlight, grace: float) -> None:
    """Take no more requests, and wait until none is in flight: those that outlast `grace` seconds are cut."""
    in_flight.close()
    if not await in_flight.wait_empty(grace):
        log.warning("shutting down: requests that took more than %g s more are cut", grace)
        in_flight.interrupt_all()
        await in_flight.wait_empty(FAREWELL_SECONDS)
