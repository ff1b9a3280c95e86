"""How far a long copy has come, said now and then with its rate and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 3.0
MB = 1e6


class Progress:
    """Counts the bytes of a copy; the first line comes after EVERY_S seconds."""

    def __init__(self, what: str, report: Callable[[str], None] | None) -> None:
        self._what = what
        self._report = report
        self._total = 0
        self._done = 0
        self._began = self._said = time.monotonic()

    def expect(self, count: int) -> None:
        """Count bytes that are to be copied."""
        self._total += count

    def add(self, count: int) -> None:
        """Count bytes that were copied."""
        self._done += count
        now = time.monotonic()
        if self._report is not None and now - self._said >= EVERY_S:
            self._said = now
            self._report(f"{self._what}: {self._words(now)}")

    def _words(self, now: float) -> str:
        rate = self._done / (now - self._began)
        left = duration((self._total - self._done) / rate)
        share = 100 * self._done / self._total
        return f"{share:.0f} % ({self._done / MB:.0f} of {self._total / MB:.0f} MB), {rate / MB:.1f} MB/s, {left} left"


def duration(seconds: float) -> str:
    """Return a duration in words, such as 45 s, 12 min 05 s or 2 h 30 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
