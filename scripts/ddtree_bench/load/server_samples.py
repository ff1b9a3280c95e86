"""Samples of what the server says of its own load while a cell is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import pandas as pd

from ddtree_bench.servers.load_now import load_now

EVERY_S = 1.0
"""Pause between two samples."""

COLUMNS = ("time", "running", "queued")
"""The moment at which the sample had come, s of time.perf_counter(), and the server's `running_requests` and
`queued_requests`, NaN where it does not tell."""

SAMPLE_S = 2.0
"""Longest wait for one sample, in s."""

Sample = Callable[[], Mapping[str, float]]


def sampler_for(base_url: str, headers: Mapping[str, str] | None = None, timeout_s: float = SAMPLE_S) -> Sample | None:
    """Return what asks a running server for its load, as Sampler wants it; None when the server does not tell.

    It keeps one connection and reads the lightest page that tells, for it runs beside the thread that reads answers.
    Asks the server once. Raises nothing.
    """
    return load_now(base_url, timeout_s, headers)


class Sampler:
    """Asks every EVERY_S in a thread of its own, from the first pause after `start` until its context closes.

    `sample` returns the server's counters, of which `running_requests` and `queued_requests` are kept. It must have a
    time limit of its own, for the context waits for a call in flight when it closes; then its `close` is called, if it
    has one. What it raises costs the sample and never the measurement: it is counted in `errors`.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-samples")
        self._taken: list[tuple[float, float, float]] = []
        self.errors = 0

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        close = getattr(self._sample, "close", None)
        if close is not None:
            close()

    def start(self) -> None:
        """Begin; once only."""
        self._thread.start()

    def frame(self) -> pd.DataFrame:
        """Return the samples in order, floats in the columns of COLUMNS."""
        return frame(self._taken)

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            try:
                counters = self._sample()
                running, queued = (float(counters.get(f"{what}_requests", "nan")) for what in ("running", "queued"))
            except Exception:  # whatever the caller's function raises
                self.errors += 1
            else:
                self._taken.append((time.perf_counter(), running, queued))


def frame(samples: list[tuple[float, float, float]]) -> pd.DataFrame:
    """Return samples, given as (time, running, queued), as a frame of floats with the columns of COLUMNS."""
    return pd.DataFrame(samples, columns=list(COLUMNS), dtype=float)
