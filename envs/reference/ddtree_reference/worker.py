"""The engine thread: requests wait in a queue and are answered one after another."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ddtree_reference import decode
from ddtree_reference.decode import Engine, Method
from ddtree_reference.stats import Counters, SpecCounts
from ddtree_reference.tokenizer import Detokeniser, StopStrings, Tokenizer

FAULT_VARIABLE = "DDTREE_REFERENCE_FAULT"
FAULT_ROUNDS = 2  # rounds that are sent before an injected crash or exception

FinishReason = Literal["stop", "length"]

log = logging.getLogger("ddtree_reference")


@dataclass(frozen=True)
class Update:
    """News of an answer: its new text and all tokens so far. The last one has `finish_reason` or `error`."""

    text: str
    completion_tokens: int
    finish_reason: FinishReason | None = None
    spec: dict[str, Any] | None = None
    error: str | None = None

    @property
    def last(self) -> bool:
        """Whether no more updates follow."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True)
class Job:
    """One request. `emit` is called on the engine thread; `cancelled` ends the job at the next round."""

    prompt_text: str
    prompt: tuple[int, ...]
    max_tokens: int
    eos: int | None
    stops: tuple[str, ...]
    emit: Callable[[Update], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Fault:
    """What tests ask for: no start, or an answer to a prompt with `text` in it that crashes or raises."""

    kind: Literal["start", "prompt", "raise"]
    text: str = ""


def parse_fault(value: str | None, method: Method) -> Fault | None:
    """The fault that a value like `DDTREE:8@start` or `DFLASH@prompt=haiku` asks of this method, if any.

    `start` ends the server at once, `prompt=TEXT` in the middle of an answer to a prompt that contains TEXT;
    `raise=TEXT` raises an exception there. Raises ValueError if the value has another form.
    """
    if not value:
        return None
    where, _, what = value.partition("@")
    algorithm, _, budget = where.partition(":")
    kind, equals, text = what.partition("=")
    faults: dict[tuple[str, str], Fault] = {
        ("start", ""): Fault("start"),
        ("prompt", "="): Fault("prompt", text),
        ("raise", "="): Fault("raise", text),
    }
    fault = faults.get((kind, equals))
    if fault is None or algorithm not in ("AR", "DFLASH", "DDTREE"):
        raise ValueError(f"{FAULT_VARIABLE}={value!r}: use METHOD[:BUDGET]@start, ...@prompt=TEXT or ...@raise=TEXT")
    if algorithm != method.algorithm or (budget and budget != str(method.budget)):
        return None
    return fault


class Worker:
    """Owns the engine and the thread it runs on; `submit` may be called from any thread."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, method: Method, threads: int, fault: Fault | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.method = method
        self.counters = Counters()
        self._threads = threads
        self._fault = fault
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._current: Job | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are answered: the engine thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float = 0.5) -> None:
        """Cancel what runs and waits, and end the thread."""
        while True:
            try:
                waiting = self._jobs.get_nowait()
            except queue.Empty:
                break
            if waiting is not None:
                waiting.cancelled.set()
        if (current := self._current) is not None:
            current.cancelled.set()
        self._jobs.put(None)
        self._thread.join(timeout)

    def submit(self, job: Job) -> None:
        """Queue a request. Its `emit` hears nothing more once it has been cancelled."""
        self.counters.requests_total += 1
        self._jobs.put(job)

    def snapshot(self) -> dict[str, int]:
        """The counters now."""
        self.counters.running_requests = int(self._current is not None)
        self.counters.queued_requests = self._jobs.qsize()
        return self.counters.snapshot()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps the number per thread
        while (job := self._jobs.get()) is not None:
            if job.cancelled.is_set():
                continue
            self._current = job
            try:
                last = self._answer(job)
            except Exception as error:  # one bad request must not end the server: the client and the log hear of it
                log.exception("request failed")
                last = Update("", 0, error=f"{type(error).__name__}: {error}")
            # idle before the client hears of the end, so that counters it reads then are final
            self._current = None
            if last is not None:
                try:
                    job.emit(last)
                except Exception:  # nobody left to hear of it but the log
                    log.exception("the end of a request could not be told")

    def _answer(self, job: Job) -> Update | None:
        """Decode one request and emit an update for each round with text; return the last one, None if cancelled."""
        detokeniser, stops, spec = Detokeniser(self.tokenizer), StopStrings(job.stops), SpecCounts()
        self.counters.prompt_tokens_total += len(job.prompt)
        done = 0
        steps = decode.generate(self.engine, self.method, job.prompt, job.max_tokens, job.eos)
        for number, step in enumerate(steps):
            text, ended = "", False
            for token in step.tokens:
                shown, stopped = stops.push(detokeniser.push(token))
                text, done, ended = text + shown, done + 1, stopped or token == job.eos
                self.counters.generation_tokens_total += 1
                if ended:
                    break
            spec.add(step)
            self.counters.add(step)
            if job.cancelled.is_set():
                return None
            if ended or done == job.max_tokens:
                details = spec.details(self.method, done)
                return Update(text + stops.flush(), done, "stop" if ended else "length", details)
            if text:
                job.emit(Update(text, done))
            if number == FAULT_ROUNDS:
                self._fail_if_asked(job)
        raise RuntimeError("decoding ended before the answer did")

    def _fail_if_asked(self, job: Job) -> None:
        """Raise, or die as a crashing server would, in the middle of an answer, if the fault hook asks for it."""
        fault = self._fault
        if fault is None or fault.kind == "start" or fault.text not in job.prompt_text:
            return
        message = f"{FAULT_VARIABLE}: {fault.kind} on a prompt that contains {fault.text!r}"
        if fault.kind == "raise":
            raise RuntimeError(message)
        log.error(message)
        time.sleep(0.2)  # the first tokens are on their way to the client
        os._exit(3)
