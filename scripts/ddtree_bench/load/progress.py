"""What a measurement shows while it runs: requests done and in flight, tokens per second now, time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ddtree_bench.load.live import Live

LINE_EVERY_S = 5.0
"""Pause between two lines where the output is no terminal."""

RATE_OVER_S = 2.0
"""Tokens per second are those of about this long, so that the number follows what happens."""


class LiveRate:
    """Tokens per second over the last RATE_OVER_S, from counts that only grow."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque([(0.0, 0)])

    def add(self, elapsed_s: float, tokens: int) -> float:
        """Take the count at a moment and return the rate, tokens/s; 0 before any time has passed."""
        self._seen.append((elapsed_s, tokens))
        while len(self._seen) > 2 and elapsed_s - self._seen[1][0] >= RATE_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (tokens - before) / (elapsed_s - since) if elapsed_s > since else 0.0


def sentence(live: Live, rate: float) -> str:
    """Return how a cell fares in one line; tokens that are counted by events are at least so many."""
    about = "" if live.tokens_exact else "at least "
    return f"{live.ended} of {live.planned} requests done, {live.in_flight} in flight, {about}{rate:.0f} tokens/s"


class Display:
    """Shows each `Live` it is called with on stderr: a bar in a terminal, a line now and then elsewhere.

    The bar has no thread of its own, which would take time from those that stamp. Nothing that goes wrong with the
    output (a terminal that was closed) is raised.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._rate = LiveRate()
        self._show: Callable[[Live, float], None] = _Bar(self._console) if self._console.is_terminal else self._line
        self._next_line_s = 0.0
        self._ended = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(self._show, _Bar):
            with suppress(OSError):
                self._show.close()

    def __call__(self, live: Live) -> None:
        """Show how the cell fares."""
        rate = self._rate.add(live.elapsed_s, live.tokens)
        with suppress(OSError):
            self._show(live, rate)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        with suppress(OSError):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, live: Live, rate: float) -> None:
        last = live.ended == live.planned and not self._ended
        if live.elapsed_s >= self._next_line_s or last:
            self._ended = last
            self._next_line_s = live.elapsed_s + LINE_EVERY_S
            self.say(f"{sentence(live, rate)}, {live.elapsed_s:.0f} s")


class _Bar:
    def __init__(self, console: Console) -> None:
        columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._progress.start()
        self._task = self._progress.add_task("", total=None)

    def __call__(self, live: Live, rate: float) -> None:
        self._progress.update(
            self._task,
            total=live.planned,
            completed=live.ended,
            description=sentence(live, rate),
            refresh=True,
        )

    def close(self) -> None:
        self._progress.stop()
