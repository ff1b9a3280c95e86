"""The conversation with the host agent: a question, its answer, over a stream that can be opened anew."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from queue import Empty, Queue
from typing import Any

from ddtree_bench.targets.launcher import Stream, TargetError
from ddtree_bench.targets.ssh.failures import LinkLost

ANSWER_S = 8.0
"""How long an answer may take: the agent's own commands have less."""

LOOK_EVERY_S = 0.1
"""How often an agent that is waited for is seen to be there."""


class HostAgent:
    """The agent of a host. `open_stream` starts it, given what takes its lines. For any thread, one question at a time.

    It ends with the connection that it was started over.
    """

    def __init__(self, open_stream: Callable[[Callable[[str], None]], Stream]) -> None:
        self._open_stream = open_stream
        self._stream: Stream | None = None
        self._answers: Queue[str] = Queue()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Start an agent, unless one is there. Raises TargetError, LinkLost among them."""
        with self._lock:
            if self._stream is None or self._stream.ended:
                self._answers = Queue()
                self._stream = self._open_stream(self._answers.put)

    def ask(self, operation: str, *, timeout_s: float = ANSWER_S, **values: Any) -> dict[str, Any]:
        """Return the answer to one question.

        Raises LinkLost when there is none within `timeout_s` seconds, or no agent; the agent is then given up, since a
        late answer would be taken for that to the next question. Raises TargetError when the agent could not do it.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise LinkLost(f"the host agent has not answered another question within {timeout_s:g} s")
        try:
            answer = self._answer(json.dumps({"op": operation, **values}), timeout_s)
        finally:
            self._lock.release()
        if "error" in answer:
            raise TargetError(f"the host agent could not {operation}: {answer['error']}")
        return answer

    def _answer(self, question: str, timeout_s: float) -> dict[str, Any]:
        stream = self._stream
        if stream is None or stream.ended:
            raise LinkLost("the host agent is gone")
        try:
            stream.send(question)
            return self._next_answer(stream, timeout_s)
        except BaseException as error:
            # Also after an interrupt: the answer would come to whoever asks next.
            self._stream = None
            # An agent that hangs is killed there, which takes its time.
            threading.Thread(target=stream.close, name="end of a host agent", daemon=True).start()
            if isinstance(error, TargetError):
                raise LinkLost(str(error)) from None
            raise

    def _next_answer(self, stream: Stream, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return dict(json.loads(self._answers.get(timeout=LOOK_EVERY_S)))
            except Empty:
                if stream.ended:
                    raise LinkLost("the host agent is gone") from None
                if time.monotonic() > deadline:
                    raise LinkLost(f"the host agent has not answered within {timeout_s:g} s") from None
            except ValueError as error:
                raise LinkLost(f"the host agent answered with no JSON: {error}") from error
