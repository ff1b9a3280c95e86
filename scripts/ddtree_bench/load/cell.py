"""The measurement of a cell: users that send requests as the load says, and what came of each."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import pandas as pd

from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.load.arrivals import STAGGER_S, intended_starts
from ddtree_bench.load.bodies import PATHS, request_body
from ddtree_bench.load.client_record import Scheduling, allow_connections, scheduling, undisturbed
from ddtree_bench.load.connection import Connection, Flight, tls_context
from ddtree_bench.load.exchange import DEFAULT_LIMITS, Failure, Limits
from ddtree_bench.load.live import Live, TokenCount
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.load.reader import Reader
from ddtree_bench.load.requests_table import Sent
from ddtree_bench.load.tokenizer import Tokenizer
from ddtree_bench.load.wire import request_bytes
from ddtree_bench.plan import Load, Workload

Result = TypeVar("Result")

POLL_S = 0.2
"""How often `abort` is asked and the deadline looked at while requests are in flight."""

WATCH_S = 0.5
"""How often `watch` is told how the cell stands."""

_GONE_AFTER = 10


@dataclass(frozen=True)
class Measurement:
    """What one cell gave.

    Attributes
    ----------
    requests : DataFrame
        Columns of requests_table.SCHEMA, one row for each request that was sent or found no connection, by index.
    client : dict
        How the client itself fared: wall_s and the process's cpu_s from the first request to the last answer;
        events_read (reads of all answers); of the reading thread reader_cpu_s, reader_wait_s (ready, but without a CPU)
        and reader_slices (how often it got one); run_queue_wait_s of all its threads, summed; kernel_stamps (there are
        lags) and clock_stepped (their clock was set meanwhile, so they have none); connections_preopened, and
        connection_retries it took;
        server_sample_errors (samples that failed). None where the kernel does not say or nothing was asked for.
    server_samples : DataFrame
        Columns of server_samples.COLUMNS; no row without a `sample` to call.
    planned : int
        Requests that were to be sent.
    aborted : str or None
        Why the cell was ended early.
    """

    requests: pd.DataFrame
    client: dict[str, float | int | bool | None]
    server_samples: pd.DataFrame
    planned: int
    aborted: str | None


def measure(
    base_url: str,
    workload: Workload,
    prompts: Sequence[Prompt],
    load: Load,
    model: str,
    *,
    abort: Callable[[], str | None] = lambda: None,
    sample: server_samples.Sample | None = None,
    limits: Limits = DEFAULT_LIMITS,
    headers: Mapping[str, str] | None = None,
    tokenizer: Tokenizer | None = None,
    watch: Callable[[Live], None] | None = None,
    stagger_s: float = STAGGER_S,
    seed: int = 0,
    omit: Collection[str] = (),
) -> Measurement:
    """Send every prompt once, as the load says, and return the raw record.

    Connections are opened before the clock starts. `abort` is polled; the first reason it returns cuts the requests in
    flight and ends the cell, as does `limits.cell_s`. `sample` returns the server's own counts; it is called every
    second in a thread of its own. `watch` is called about twice a second in this thread. `headers` are sent with every
    request. `tokenizer` counts the tokens of answers whose server does not. `stagger_s` is the pause between the first
    sends of the users of a closed loop, `seed` that of Poisson arrivals. `omit` names fields of the body that are not
    to be sent, for servers that refuse what the OpenAI API does not have.

    Requests that fail are rows; nothing about the server is raised. Raises ValueError for a concurrency below 1, no
    prompts, limits that are not above 0, an open loop without a rate, more connections than the system allows open
    files, or an unusable URL.
    """
    _check(load, prompts, limits)
    url = f"{base_url.rstrip('/')}{PATHS[workload.endpoint]}"
    bodies = [_without(request_body(workload, prompt, model), omit) for prompt in prompts]
    requests = [
        _Request(index, prompt, request_bytes(url, body, headers or {}))
        for index, (prompt, body) in enumerate(zip(prompts, bodies, strict=True))
    ]
    starts = intended_starts(load, len(requests), seed)
    users = min(load.concurrency, len(requests))
    allow_connections(users)
    cell = _Cell(base_url, requests, starts, users, limits, stagger_s)
    with undisturbed():
        cell.run(abort, sample, watch)
    rows = (requests_table.row(one, workload.max_tokens, tokenizer) for one in cell.sent())
    return Measurement(
        requests=requests_table.to_frame(rows),
        client=cell.client,
        server_samples=cell.samples,
        planned=len(requests),
        aborted=cell.aborted,
    )


def _without(body: dict[str, Any], omit: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in omit}


def _check(load: Load, prompts: Sequence[Prompt], limits: Limits) -> None:
    if load.concurrency < 1 or not prompts:
        raise ValueError(f"concurrency: {load.concurrency} and {len(prompts)} prompts; both must be at least 1")
    for name in ("connect_s", "idle_s", "request_s", "cell_s"):
        if not getattr(limits, name) > 0:
            raise ValueError(f"{name}: {getattr(limits, name)}; a limit of time must be above 0 s")
    if limits.connect_retries < 0:
        raise ValueError(f"connect_retries: {limits.connect_retries}; must be 0 or more")


@dataclass(frozen=True)
class _Request:
    """One request of a cell, ready to be sent before the clock runs."""

    index: int
    prompt: Prompt
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class _Flown:
    """A request that was sent, by which user and how it went."""

    request: _Request
    user: int
    intended_start: float | None
    flight: Flight


class _Tally:
    """Counts tasks that ended; `complete` when all have, or one has failed.

    concurrent.futures.wait would lock each of hundreds of tasks, twice a call, while their answers are being read.
    """

    def __init__(self, tasks: int) -> None:
        self._left = tasks
        self._lock = threading.Lock()
        self.complete = threading.Event()

    def count(self, task: Future[Any]) -> None:
        """Take note of a task that ended."""
        with self._lock:
            self._left -= 1
            if not self._left or task.exception():
                self.complete.set()


class _Cell:
    """The users of one cell and what they share."""

    def __init__(
        self,
        base_url: str,
        requests: Sequence[_Request],
        starts: Sequence[float] | None,
        users: int,
        limits: Limits,
        stagger_s: float,
    ) -> None:
        self._base_url = base_url
        self._users = users
        self._limits = limits
        self._starts = starts
        self._stagger_s = stagger_s
        self._planned = len(requests)
        self._stopping = threading.Event()
        self._waiting: SimpleQueue[_Request] = SimpleQueue()
        for request in requests:
            self._waiting.put(request)
        self._numbers = count()
        self._begun = math.inf
        self._reader = Reader()
        self._flown: list[_Flown] = []
        self._tokens = TokenCount()
        self._cut = False
        self.aborted: str | None = None
        self.client: dict[str, float | int | bool | None] = {}
        self.samples = server_samples.frame([])

    def sent(self) -> Iterator[Sent]:
        """The requests that were sent, by index; without lags when the clock of the kernel's stamps was set."""
        self._flown.sort(key=lambda one: one.request.index, reverse=True)
        # Each is let go when its record is made: raw answers are larger than what is made of them.
        while self._flown:
            yield self._record(self._flown.pop())

    def _record(self, one: _Flown) -> Sent:
        exchange = one.flight.exchange(self._reader)
        if self.client["clock_stepped"]:
            exchange = replace(exchange, lags=array("d", [math.nan]) * len(exchange.lags))
        return Sent(one.request.index, one.request.prompt, one.user, exchange, one.intended_start)

    def run(
        self,
        abort: Callable[[], str | None],
        sample: server_samples.Sample | None,
        watch: Callable[[Live], None] | None,
    ) -> None:
        """Measure; fills `client`, `samples` and `aborted`."""
        with ExitStack() as stack:
            sampler = stack.enter_context(server_samples.Sampler(sample)) if sample else None
            reader = stack.enter_context(self._reader)
            tls = tls_context(self._base_url)
            connections = [
                stack.enter_context(closing(Connection(self._base_url, self._limits, reader, self._stopping, tls)))
                for _ in range(self._users)
            ]
            pool = stack.enter_context(ThreadPoolExecutor(self._users, thread_name_prefix="user"))
            try:
                opened = self._do(pool, Connection.open, connections, abort, None)
                if sampler:
                    sampler.start()
                cpu = time.process_time()
                waits = self._do(pool, self._use, connections, abort, watch)
            except BaseException:
                self._stop(Failure("truncated", "interrupted: the measurement was interrupted"))
                raise
            self.client = {
                "wall_s": time.perf_counter() - self._begun,
                "cpu_s": time.process_time() - cpu,
                "connections_preopened": sum(one.error is None for one in opened),
                "connection_retries": sum(one.retries for one in opened),
                "server_sample_errors": sampler.errors if sampler else None,
                "clock_stepped": reader.clock_stepped,
            }
        self.client |= self._reading() | {"run_queue_wait_s": _total_wait([*waits, self._reader.scheduling])}
        if sampler:
            self.samples = sampler.frame()

    def _do(
        self,
        pool: ThreadPoolExecutor,
        task: Callable[[Connection], Result],
        connections: Sequence[Connection],
        abort: Callable[[], str | None],
        watch: Callable[[Live], None] | None,
    ) -> list[Result]:
        """Let each user do something with its connection, at once; a reason to abort or the deadline cuts it short."""
        self._begun = time.perf_counter()
        tally = _Tally(len(connections))
        tasks = [pool.submit(task, connection) for connection in connections]
        for one in tasks:
            one.add_done_callback(tally.count)
        self._watch(tally, abort, watch)
        for one in tasks:
            if one.done():
                one.result()
        return [one.result() for one in tasks]

    def _reading(self) -> dict[str, float | int | bool | None]:
        readings = [one.flight.reading for one in self._flown if one.flight.reading]
        thread = self._reader.scheduling
        return {
            "events_read": sum(len(one.reads) for one in readings),
            "kernel_stamps": any(stamp for one in readings for _, _, stamp in one.reads),
            "reader_cpu_s": thread.cpu_s if thread else None,
            "reader_wait_s": thread.wait_s if thread else None,
            "reader_slices": thread.slices if thread else None,
        }

    def _use(self, connection: Connection) -> Scheduling | None:
        """One user: take the next request, wait for its moment, send it, wait for the end of its answer."""
        before, number = scheduling(), next(self._numbers)
        if self._starts is None:
            self._stopping.wait(number * self._stagger_s)
        while not self._stopping.is_set():
            try:
                request = self._waiting.get_nowait()
            except Empty:
                break
            intended = None if self._starts is None else self._begun + self._starts[request.index]
            if intended is not None and self._stopping.wait(max(0.0, intended - time.perf_counter())):
                break
            flight = connection.ask(request.content)
            if flight is None:
                break
            self._flown.append(_Flown(request, number, intended, flight))
            if _never_connected(flight) and self._server_is_gone():
                self.aborted = "the server takes no connections any more"
                self._stopping.set()
        after = scheduling()
        return after - before if after and before else None

    def _watch(self, tally: _Tally, abort: Callable[[], str | None], watch: Callable[[Live], None] | None) -> None:
        """Wait for what the users do; a reason to abort or the deadline stops it."""
        next_watch = 0.0
        while not tally.complete.wait(POLL_S):
            now = time.perf_counter()
            if not self._cut:
                self._look_for_an_end(abort, now)
            if watch and now >= next_watch:
                watch(self._live(now))
                next_watch = now + WATCH_S
        if watch:
            watch(self._live(time.perf_counter()))

    def _look_for_an_end(self, abort: Callable[[], str | None], now: float) -> None:
        if now - self._begun > self._limits.cell_s:
            reason = f"the cell's deadline of {self._limits.cell_s:g} s was reached"
            self._cut_short(reason, Failure("timeout", reason))
        elif given := abort():
            self._cut_short(given, Failure("truncated", f"interrupted: {given}"))

    def _cut_short(self, reason: str, failure: Failure) -> None:
        self._cut = True
        self.aborted = self.aborted or reason
        self._stop(failure)

    def _server_is_gone(self) -> bool:
        """Whether the last requests, two a user and ten at least, found no connection: the others would not either."""
        wanted = max(_GONE_AFTER, 2 * self._users)
        last = self._flown[-wanted:]
        return len(last) == wanted and all(_never_connected(one.flight) for one in last)

    def _stop(self, failure: Failure) -> None:
        self._stopping.set()
        self._reader.stop(failure)

    def _live(self, now: float) -> Live:
        readings, flights = self._reader.in_flight(), [one.flight for one in self._flown]
        tokens, exact = self._tokens.so_far(flights, readings)
        return Live(
            elapsed_s=now - self._begun,
            planned=self._planned,
            sent=len(flights) + len(readings),
            ended=len(flights),
            in_flight=len(readings),
            tokens=tokens,
            tokens_exact=exact,
        )


def _never_connected(flight: Flight) -> bool:
    return flight.failure is not None and flight.failure.status == "connect_error" and flight.reading is None


def _total_wait(records: Sequence[Scheduling | None]) -> float | None:
    return None if None in records else sum(record.wait_s for record in records if record)
