"""Progress of a long stage, printed now and then: amount, rate, time left."""

from __future__ import annotations

import sys
import time

INTERVAL_S = 10.0


class Progress:
    """Counts what is done of `total`, since this process began with it."""

    def __init__(self, stage: str, unit: str, total: int) -> None:
        self._stage, self._unit, self._total = stage, unit, total
        self._began = self._printed = time.monotonic()
        self._done = 0

    def add(self, amount: int, note: str = "") -> None:
        """Count `amount` more; print a line if the last one is a while ago or all is done."""
        self._done += amount
        now = time.monotonic()
        if now - self._printed < INTERVAL_S and self._done < self._total:
            return
        self._printed = now
        rate = self._done / max(now - self._began, 1e-9)
        left = max(0, self._total - self._done) / max(rate, 1e-9)
        print(
            f"{self._stage}: {self._done:,} of {self._total:,} {self._unit}, {rate:,.1f} {self._unit}/s, "
            f"{format_seconds(left)} left{note}",
            file=sys.stderr,
            flush=True,
        )


def format_seconds(seconds: float) -> str:
    """A duration as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
