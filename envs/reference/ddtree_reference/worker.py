"""The engine thread: takes requests from other threads, steps the scheduler, and tells clients what it commits."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ddtree_reference.answer import Answer, Update
from ddtree_reference.decode import Engine
from ddtree_reference.fault import ROUNDS, Fault
from ddtree_reference.method import Method
from ddtree_reference.round_log import RoundLog
from ddtree_reference.sampling import GREEDY, Sampling
from ddtree_reference.scheduler import Advance, Scheduler
from ddtree_reference.sequence import Request
from ddtree_reference.stats import Counters
from ddtree_reference.tokenizer import Tokenizer

STOPPED = "the server is shutting down"

log = logging.getLogger("ddtree_reference")


class QueueFull(Exception):
    """More requests wait than the server lets wait."""


@dataclass(frozen=True, eq=False)
class Job:
    """One request. `emit` is called on the engine thread; `cancelled` ends the job at the next round."""

    prompt_text: str
    prompt: tuple[int, ...]
    max_tokens: int
    eos: int | None
    stops: tuple[str, ...]
    emit: Callable[[Update], None]
    sampling: Sampling = GREEDY
    top_logprobs: int | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def request(self) -> Request:
        """What the scheduler needs to know of it."""
        return Request(self.prompt, self.max_tokens, self.eos, self.sampling, self.top_logprobs)


class Worker:
    """Owns the engine and the thread it runs on; its methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        method: Method,
        threads: int = 1,
        *,
        max_queued_requests: int | None = None,
        fault: Fault | None = None,
        round_log: RoundLog | None = None,
    ) -> None:
        self.engine = engine
        self.method = method
        self.counters = Counters(
            max_running_requests=engine.pool.total, kv_tokens_total=engine.pool.total * engine.pool.slots
        )
        self._lock = threading.Lock()
        self._unfinished = 0  # jobs that were submitted and still hold, or wait for, a region
        self._tokenizer = tokenizer
        self._threads = threads
        self._max_queued_requests = max_queued_requests
        self._fault = fault
        self._round_log = round_log
        self._scheduler: Scheduler[Job] = Scheduler(engine, method)
        self._answers: dict[Job, Answer] = {}
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are answered: the engine thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float = 0.5) -> None:
        """End what runs and waits with an error update, and end the thread."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(timeout)

    def submit(self, job: Job) -> None:
        """Queue a request. Its `emit` hears nothing more once it has been cancelled.

        Raises QueueFull if as many requests wait as may, and ValueError if it does not fit into the context.
        """
        self._scheduler.check(job.request)
        with self._lock:
            waiting = self._unfinished - self.engine.pool.total
            if self._max_queued_requests is not None and waiting >= self._max_queued_requests:
                raise QueueFull(f"{self._max_queued_requests} requests wait already")
            self._unfinished += 1
            self.counters.requests_total += 1
        self._inbox.put(job)

    def flush_cache(self) -> bool:
        """Forget the prompts kept for reuse; False, and nothing done, while requests run or wait."""
        with self._lock:  # nothing is unfinished: the engine thread has nothing to do with the pool
            if self._unfinished:
                return False
            self.engine.pool.flush()
            return True

    def snapshot(self) -> dict[str, int]:
        """The counters now."""
        running = self._scheduler.running
        self.counters.running_requests = running
        self.counters.queued_requests = max(0, self._unfinished - running)
        self.counters.kv_tokens_used = self._scheduler.tokens_held
        self.counters.kv_regions_free = self.engine.pool.free
        return self.counters.snapshot()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps the number per thread
        while not self._stopping.is_set():
            self._take_in()
            self._drop_cancelled()
            try:
                self._step()
            except Exception as error:  # a failing engine must not end the server: clients and the log hear of it
                log.exception("a round failed")
                self._fail_all(f"{type(error).__name__}: {error}")
        self._take_in()
        self._fail_all(STOPPED)

    def _take_in(self) -> None:
        """Move requests from the inbox to the scheduler, and wait for one if there is nothing to do."""
        while not (self._inbox.empty() and (self._answers or self._stopping.is_set())):
            job = self._inbox.get()
            if job is not None:
                eos, stops = job.eos, job.stops
                self._answers[job] = Answer(self._tokenizer, self.method, job.max_tokens, eos, stops)
                self._scheduler.add(job, job.request)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._answers if job.cancelled.is_set()]:
            self._forget(job)
            self.counters.aborted_requests_total += 1

    def _step(self) -> None:
        self._tell_all(self._scheduler.prefill())
        advances, seconds = self._scheduler.decode()
        if seconds is not None:
            self.counters.rounds_total += 1
            if self._round_log is not None:
                self._round_log.write([advance.round for advance in advances], seconds, self._scheduler.waiting)
        self._tell_all(advances)

    def _tell_all(self, advances: Sequence[Advance[Job]]) -> None:
        for advance in advances:
            try:
                self._tell(advance)
            except Exception as error:  # one bad request must not end the others
                log.exception("request failed")
                self._fail(advance.key, f"{type(error).__name__}: {error}")

    def _tell(self, advance: Advance[Job]) -> None:
        """Count what a round committed for one request and let its client hear of it."""
        job, committed = advance.key, advance.round
        answer = self._answers[job]
        before = answer.tokens
        update = answer.push(committed, advance.cached)
        self.counters.add(committed, answer.tokens - before)
        if before == 0:
            self.counters.prompt_tokens_total += len(job.prompt)
            self.counters.cached_tokens_total += advance.cached
        if update.last:
            self._forget(job)  # before the client hears of it, so that counters it reads then are final
        if job.cancelled.is_set():
            return
        if update.text or update.logprobs or update.last:
            job.emit(update)
        if self._fault is not None and not update.last and answer.rounds == ROUNDS + 1:
            self._fault.strike(job.prompt_text)

    def _forget(self, job: Job) -> None:
        """Drop a request, once; its region is back before it no longer counts as unfinished."""
        if self._answers.pop(job, None) is None:
            return
        self._scheduler.drop(job)
        with self._lock:
            self._unfinished -= 1

    def _fail(self, job: Job, reason: str) -> None:
        """Drop a request and tell its client why."""
        self._forget(job)
        self.counters.failed_requests_total += 1
        if job.cancelled.is_set():
            return
        try:
            job.emit(Update("", 0, error=reason))
        except Exception:  # nobody left to hear of it but the log
            log.exception("the end of a request could not be told")

    def _fail_all(self, reason: str) -> None:
        for job in list(self._answers):
            self._fail(job, reason)
