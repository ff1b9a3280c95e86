"""Closed-loop load: a fixed number of requests in flight, taken in order from one list of prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import pandas as pd

from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.load.client import DEFAULT_TIMEOUTS, PATHS, Connection, Timeouts, request_body
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Workload

POLL_S = 0.2
"""How often `abort` is asked while requests are in flight."""

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Measurement:
    """What one cell gave.

    `requests` has the columns of requests_table.SCHEMA, one row for each request that was sent, by index. `client`
    tells how the client itself fared: wall_s and the process's cpu_s from the first request to the last answer,
    run_queue_wait_s (time its threads were ready and not running, summed over them; None where the kernel does not
    say), connections_preopened and server_sample_errors (samples that failed; None where none were asked for).
    `server_samples` has the columns of server_samples.COLUMNS and no row without a `sample` to call. `aborted` is the
    reason when the cell was ended early.
    """

    requests: pd.DataFrame
    client: dict[str, float | int | None]
    server_samples: pd.DataFrame
    aborted: str | None


def measure(
    base_url: str,
    workload: Workload,
    prompts: Sequence[Prompt],
    concurrency: int,
    model: str,
    *,
    abort: Callable[[], str | None] = lambda: None,
    sample: server_samples.Sample | None = None,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> Measurement:
    """Send every prompt once, `concurrency` at a time, and return the raw record.

    Connections are opened before the clock starts. `abort` is polled; the first reason it returns cuts the requests in
    flight and ends the cell. `sample` returns the server's own counters; it is called every second in a thread of its
    own (`server_samples.Sampler`). Requests that fail are rows; nothing about the server is raised. Raises ValueError
    for a concurrency below 1 or no prompts.
    """
    if concurrency < 1 or not prompts:
        raise ValueError(f"concurrency: {concurrency} and {len(prompts)} prompts; both must be at least 1")
    with ExitStack() as stack:
        slots = range(min(concurrency, len(prompts)))
        connections = [stack.enter_context(closing(Connection(base_url, timeouts))) for _ in slots]
        return _Loop(workload, prompts, model, connections).run(abort, sample)


class _Loop:
    """The threads of one measurement and what they share."""

    def __init__(
        self, workload: Workload, prompts: Sequence[Prompt], model: str, connections: Sequence[Connection]
    ) -> None:
        self._workload = workload
        self._model = model
        self._connections = connections
        self._stopped = threading.Event()
        self._queue: SimpleQueue[tuple[int, Prompt]] = SimpleQueue()
        for item in enumerate(prompts):
            self._queue.put(item)

    def run(self, abort: Callable[[], str | None], sample: server_samples.Sample | None) -> Measurement:
        sampler = server_samples.Sampler(sample) if sample else None
        threads = ThreadPoolExecutor(len(self._connections), thread_name_prefix="load")
        with sampler or nullcontext(), threads as pool:
            try:
                open_errors = list(pool.map(Connection.open, self._connections))
                if sampler:
                    sampler.start()
                wall, cpu = time.perf_counter(), time.process_time()
                workers = [pool.submit(self._work, number) for number in range(len(self._connections))]
                aborted = self._watch(workers, abort)
            except BaseException:
                self._stop("the measurement was interrupted")
                raise
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            results = [worker.result() for worker in workers]
        sent = sorted((one for requests, _ in results for one in requests), key=lambda one: one.index)
        waits = [waited for _, waited in results]
        client: dict[str, float | int | None] = {
            "wall_s": wall,
            "cpu_s": cpu,
            "run_queue_wait_s": None if None in waits else sum(w for w in waits if w is not None),
            "connections_preopened": open_errors.count(None),
            "server_sample_errors": sampler.errors if sampler else None,
        }
        rows = (requests_table.row(one, self._workload.max_tokens) for one in sent)
        samples = sampler.frame() if sampler else server_samples.frame([])
        return Measurement(requests_table.to_frame(rows), client, samples, aborted)

    def _watch(
        self, workers: Sequence[Future[tuple[list[requests_table.Sent], float | None]]], abort: Callable[[], str | None]
    ) -> str | None:
        """Wait for the workers; return the reason if `abort` gave one. A worker's own exception stops the others."""
        aborted: str | None = None
        pending = set(workers)
        while pending:
            done, pending = wait(pending, timeout=POLL_S)
            for worker in done:
                worker.result()
            aborted = aborted or (abort() if pending else None)
            if aborted:
                # Again at each poll: a thread may have been between its look at the flag and its connection.
                self._stop(aborted)
        return aborted

    def _stop(self, reason: str) -> None:
        self._stopped.set()
        for connection in self._connections:
            connection.interrupt(reason)

    def _work(self, number: int) -> tuple[list[requests_table.Sent], float | None]:
        """One thread: take the next prompt, send it, read the answer, until the list is empty."""
        connection = self._connections[number]
        path = PATHS[self._workload.endpoint]
        sent = []
        waited_before = _run_queue_wait()
        while not self._stopped.is_set():
            try:
                index, prompt = self._queue.get_nowait()
            except Empty:
                break
            exchange = connection.exchange(path, request_body(self._workload, prompt.text, self._model))
            sent.append(requests_table.Sent(index, prompt, number, exchange))
        waited_after = _run_queue_wait()
        if waited_before is None or waited_after is None:
            return sent, None
        return sent, waited_after - waited_before


def _run_queue_wait() -> float | None:
    """Seconds that the calling thread has spent ready but not running; None without Linux's schedstat."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return None
