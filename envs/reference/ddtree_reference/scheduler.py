"""Continuous batching: requests wait in order, join the running batch between rounds, and leave it when they end.

`prefill` lets waiting requests join and computes prompt tokens, up to one chunk; `decode` runs one round of all whose
prompt is done. Called in turn, a long prompt delays the others by a chunk a round and no more, and since waiting
requests join in the order they came and running ones advance in every round, none can starve.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddtree_reference import decode
from ddtree_reference.decode import Engine, Round, StageTimes
from ddtree_reference.method import Method
from ddtree_reference.sequence import Request, Running

Key = TypeVar("Key")


@dataclass(frozen=True)
class Advance(Generic[Key]):
    """What was committed for one request, and whether it has left with that.

    `cached` of its prompt's tokens were known before.
    """

    key: Key
    round: Round
    cached: int
    finished: bool


class Scheduler(Generic[Key]):
    """Runs requests on an engine, as many at a time as its pool has regions. Requests are known by keys of the caller.

    Not thread-safe: one thread adds, drops and steps. Raises ValueError for a method that the engine cannot run.
    """

    def __init__(self, engine: Engine, method: Method) -> None:
        decode.check_method(engine, method)
        self.engine = engine
        self.method = method
        self._waiting: deque[tuple[Key, Request]] = deque()
        self._running: dict[Key, Running] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait for a region."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def tokens_held(self) -> int:
        """Tokens whose keys and values running requests hold; may be asked from any thread."""
        return sum(sequence.filled for sequence in list(self._running.values()))

    def check(self, request: Request) -> None:
        """Raise ValueError if a request can never be run here; may be called from any thread."""
        decode.check_request(self.engine, request)

    def add(self, key: Key, request: Request) -> None:
        """Queue a request. Raises ValueError if it cannot fit into the context."""
        self.check(request)
        self._waiting.append((key, request))

    def drop(self, key: Key) -> None:
        """Forget a request that waits or runs; one that has left is no error."""
        sequence = self._running.pop(key, None)
        if sequence is not None:
            decode.leave(self.engine, sequence)
        elif any(waiting == key for waiting, _ in self._waiting):
            self._waiting = deque(entry for entry in self._waiting if entry[0] != key)

    def prefill(self) -> list[Advance[Key]]:
        """Let waiting requests join and compute a chunk of prompts: the first tokens of those whose prompt is done."""
        self._admit()
        joining = {sequence: key for key, sequence in self._running.items() if not sequence.prefilled}
        if not joining:
            return []
        done = decode.prefill(self.engine, self.method, list(joining))
        return [self._advance(joining[sequence], sequence, first) for sequence, first in done]

    def decode(self) -> tuple[list[Advance[Key]], StageTimes | None]:
        """Run one round of all whose prompt is done: what it committed and how long it took, None without any."""
        ready = {key: sequence for key, sequence in self._running.items() if sequence.prefilled}
        if not ready:
            return [], None
        rounds, seconds = decode.decode_round(self.engine, self.method, list(ready.values()))
        return [self._advance(key, ready[key], r) for key, r in zip(ready, rounds, strict=True)], seconds

    def step(self) -> list[Advance[Key]]:
        """Both in turn, for a caller who has nobody to tell in between."""
        return [*self.prefill(), *self.decode()[0]]

    def _admit(self) -> None:
        while self._waiting:
            key, request = self._waiting[0]
            sequence = decode.admit(self.engine, request)
            if sequence is None:
                return
            self._waiting.popleft()
            self._running[key] = sequence

    def _advance(self, key: Key, sequence: Running, committed: Round) -> Advance[Key]:
        if sequence.finished:
            del self._running[key]
            decode.leave(self.engine, sequence)
        return Advance(key, committed, sequence.cached, sequence.finished)
