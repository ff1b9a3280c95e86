"""Progress bars as lines of a log.

tqdm draws a bar again and again in one line, with carriage returns. systemd's journal hands on whole lines only, so
whoever waits for a server there would hear of a bar when it has ended. Each state is a line of its own instead.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tqdm.std import tqdm

from sglang_ddtree.options import START_ID_VARIABLE

SECONDS_BETWEEN_LINES = 1.0

_NEXT_LINE = "_ddtree_next_line"


def install() -> None:
    """Let all bars of this process be lines, where its start was given an id and its stderr is no terminal.

    Servers that others start keep their bars. SGLang's subclasses of tqdm inherit both methods.
    """
    if START_ID_VARIABLE in os.environ and not sys.stderr.isatty():
        tqdm.display = _write_line
        tqdm.clear = _keep_lines


def _write_line(bar: Any, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG001 (tqdm's signature)
    """`tqdm.display`: write the bar's state, at most once a second and always at its end; tqdm holds its lock.

    False, as nothing has to be wiped away.
    """
    closing = bar.disable  # a closed bar is drawn by `close` alone, once
    if closing and msg is None:
        bar.fp.write(str(bar))  # `close` ends the line itself; unflushed, both go out in one piece
    elif closing or _is_due(bar):
        bar.fp.write((msg or str(bar)) + "\n")
        bar.fp.flush()
    return False


def _is_due(bar: Any) -> bool:
    """Whether the bar may write again; from then on it may not for a second."""
    if not (bar.desc or hasattr(bar, "start_t")):
        return False  # still in its constructor: SGLang names the bars of its captures right after
    now = time.monotonic()
    due = now >= getattr(bar, _NEXT_LINE, now)
    if due:
        setattr(bar, _NEXT_LINE, now + SECONDS_BETWEEN_LINES)
    return due


def _keep_lines(*_args: Any, **_kwargs: Any) -> None:
    """`tqdm.clear`: a line that is written stays."""
