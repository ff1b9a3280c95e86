"""Continuous batching: requests wait in order, join the running batch between rounds, and leave it when they end.

Each step computes prompt tokens of those that have just joined, up to one prefill chunk, and then one round of all
whose prompt is done. So a long prompt delays the others by a chunk a round and no more, and since waiting requests
join in the order they came and running ones advance in every step, none can starve.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddtree_reference import decode
from ddtree_reference.decode import Engine, Round, StageTimes
from ddtree_reference.method import Method
from ddtree_reference.sequence import Request, Sequence

Key = TypeVar("Key")


@dataclass(frozen=True)
class Advance(Generic[Key]):
    """What a step committed for one request. `finished` says that the request has left the batch."""

    key: Key
    round: Round
    cached: int
    finished: bool


@dataclass(frozen=True)
class Step(Generic[Key]):
    """One step: what it committed, the requests whose prompt tokens it computed, and how long its round took.

    `seconds` is None when nothing was decoded.
    """

    advances: list[Advance[Key]]
    decoded: int
    seconds: StageTimes | None


class Scheduler(Generic[Key]):
    """Runs requests on an engine, as many at a time as its pool has regions. Requests are known by keys of the caller.

    Not thread-safe: one thread adds, cancels and steps.
    """

    def __init__(self, engine: Engine, method: Method) -> None:
        decode.check_method(engine, method)
        self.engine = engine
        self.method = method
        self._waiting: deque[tuple[Key, Request]] = deque()
        self._running: dict[Key, Sequence] = {}

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
        """Forget a request, whether it waits or runs; one that is not there any more is no error."""
        sequence = self._running.pop(key, None)
        if sequence is not None:
            self._leave(sequence)
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[0] != key)

    def step(self) -> Step[Key]:
        """Let waiting requests join, compute prompts, run one round; those that have ended leave the batch."""
        self._admit()
        advances = self._prefill()
        ready = {key: sequence for key, sequence in self._running.items() if sequence.prefilled}
        seconds = None
        if ready:
            rounds, seconds = decode.decode_round(self.engine, self.method, list(ready.values()))
            advances += [self._advance(key, ready[key], r) for key, r in zip(ready, rounds, strict=True)]
        return Step(advances, len(ready), seconds)

    def prefill_all(self) -> list[Advance[Key]]:
        """Let waiting requests join while there are regions and compute their whole prompts, without any round."""
        self._admit()
        advances: list[Advance[Key]] = []
        while not all(sequence.prefilled for sequence in self._running.values()):
            advances += self._prefill()
        return advances

    def _admit(self) -> None:
        while self._waiting:
            key, request = self._waiting[0]
            taken = self.engine.pool.take(request.prompt)
            if taken is None:
                return
            self._waiting.popleft()
            self._running[key] = Sequence(request, *taken)

    def _prefill(self) -> list[Advance[Key]]:
        keys = {id(s): key for key, s in self._running.items() if not s.prefilled}
        if not keys:
            return []
        joining = [sequence for sequence in self._running.values() if id(sequence) in keys]
        done = decode.prefill(self.engine, self.method, joining)
        return [self._advance(keys[id(sequence)], sequence, first) for sequence, first in done]

    def _advance(self, key: Key, sequence: Sequence, committed: Round) -> Advance[Key]:
        if sequence.finished:
            del self._running[key]
            self._leave(sequence)
        return Advance(key, committed, sequence.cached, sequence.finished)

    def _leave(self, sequence: Sequence) -> None:
        self.engine.pool.give_back(sequence.region, sequence.tokens[: sequence.filled])
