"""The requests that are being answered: each with its jobs, and the news of them as the engine sends it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from ddtree_reference.answer import Update
from ddtree_reference.prometheus import Measured, RequestTimes
from ddtree_reference.protocol import ApiError
from ddtree_reference.worker import Job, QueueFull, Worker

RETRY_SECONDS = 1
SHUTTING_DOWN = "the server is shutting down"

Emit = Callable[[Update], None]
MakeJob = Callable[..., Job]  # called with emit=...


class ClientGone(Exception):
    """The client has closed the connection: nobody is left to answer."""


class Exchange:
    """One request while it is answered. Belongs to the event loop, except that jobs emit from the engine thread."""

    def __init__(self, make_jobs: Sequence[MakeJob], times: RequestTimes) -> None:
        self._news: asyncio.Queue[tuple[int, Update] | ApiError | ClientGone] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._times = times
        self._done = [0] * len(make_jobs)
        self.jobs = tuple(make(emit=self._emit_of(index)) for index, make in enumerate(make_jobs))

    async def news(self) -> tuple[int, Update]:
        """The next update of any job, and the job's number.

        Raises ApiError if the request has failed, ClientGone if nobody listens any more.
        """
        said = await self._news.get()
        if not isinstance(said, tuple):
            raise said
        index, update = said
        if update.error is not None:
            raise ApiError(500, update.error, "internal_error")
        new_tokens = update.completion_tokens - self._done[index]
        self._done[index] = update.completion_tokens
        self._times.heard(index, new_tokens, update.last, time.perf_counter())
        return said

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(self._done)

    def interrupt(self, reason: ApiError | ClientGone) -> None:
        """End the request, jobs and all: whoever waits for news hears of it after what has been said already."""
        self.cancel()
        self._news.put_nowait(reason)

    def cancel(self) -> None:
        """Have the engine drop what it still does for this request."""
        for job in self.jobs:
            job.cancelled.set()

    def _emit_of(self, index: int) -> Emit:
        def emit(update: Update) -> None:
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, update))

        return emit


class InFlight:
    """All requests that are being answered. Closed, it takes no more."""

    def __init__(self, worker: Worker, measured: Measured) -> None:
        self._worker = worker
        self._measured = measured
        self._open: set[Exchange] = set()
        self.closed = False

    def check_open(self) -> None:
        """Raise ApiError if nothing would answer a request: the engine has ended, or the server is about to."""
        if self.closed:
            raise ApiError(503, SHUTTING_DOWN, "service_unavailable", RETRY_SECONDS)
        if not self._worker.alive:
            reason = "the engine thread has ended, see the server's log; restart the server"
            raise ApiError(503, reason, "internal_error")

    def begin(self, make_jobs: Sequence[MakeJob]) -> Exchange:
        """Submit the jobs of a request. Raises ApiError, with none of them left behind, if one cannot be taken."""
        self.check_open()
        now = time.perf_counter()
        exchange = Exchange(make_jobs, RequestTimes(self._measured, len(make_jobs), now))
        try:
            for job in exchange.jobs:
                self._worker.submit(job)
        except QueueFull as error:
            exchange.cancel()
            raise ApiError(503, f"{error}; try again later", "service_unavailable", RETRY_SECONDS) from error
        self._open.add(exchange)
        self._measured.throughput.began(now)
        return exchange

    @contextlib.contextmanager
    def answering(self, exchange: Exchange) -> Iterator[None]:
        """Keep a request among those in flight for as long as it is answered; what is unfinished then is cancelled."""
        try:
            yield
        finally:
            exchange.cancel()
            self._open.discard(exchange)
            self._measured.throughput.ended(time.perf_counter())

    def close(self) -> None:
        """Take no more requests."""
        self.closed = True

    def interrupt_all(self) -> None:
        """End every request with an error that tells its client why."""
        for exchange in self._open:
            exchange.interrupt(ApiError(503, f"{SHUTTING_DOWN}, the answer is cut", "service_unavailable"))

    async def wait_empty(self, timeout: float) -> bool:
        """Wait until every request has been answered; False if `timeout` seconds did not do."""
        deadline = time.monotonic() + timeout
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return not self._open
