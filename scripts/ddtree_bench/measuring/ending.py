"""How a measurement that a user has started is ended early: asked once, it keeps what it has; asked twice, it ends."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SHOW_CURSOR = b"\x1b[?25h"


class EndRequest:
    """Within the block the first SIGINT, SIGTERM or SIGHUP becomes a `reason`; a SIGINT after it ends the process.

    A signal that the process was started to ignore (nohup, a script's background job) stays ignored. Enter it in the
    main thread.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> EndRequest:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reason(self) -> str | None:
        """Return why to end, None while nobody asked."""
        return self._reason

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._reason is None:
            self._reason = f"interrupted by {signal.Signals(number).name}"
        elif number == signal.SIGINT:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
