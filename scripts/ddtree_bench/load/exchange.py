"""The raw record of one request: what came over the connection and when, nothing of it parsed."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Limits of time and of patience, seconds but for `connect_retries`.

    Attributes
    ----------
    connect_s : float
        Longest wait for one connection, TLS included.
    connect_retries : int
        How often a connection that failed is tried again, with a pause that doubles from 0.1 s. Only connections are
        tried again: a request that was sent is never sent twice.
    idle_s : float
        Longest silence on a connection while an answer is awaited, the wait for the first byte (queueing, prefill)
        included.
    request_s : float
        Longest time from sending a request to the end of its answer.
    cell_s : float
        Longest time from the first request to the end of the cell: what is in flight then is a timeout, and what is
        left is not sent.
    """

    connect_s: float = 10.0
    connect_retries: int = 2
    idle_s: float = 300.0
    request_s: float = 3600.0
    cell_s: float = 7200.0


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Failure:
    """How an exchange broke off: one of the statuses connect_error, timeout and truncated, and the message."""

    status: str
    message: str


@dataclass(frozen=True)
class Exchange:
    """One request and the bytes that came back.

    Moments are seconds of time.perf_counter(). `t_send` is just before the first byte was handed to the kernel and
    `t_sent` just after the last. `pieces[i]` are the bytes of read i, response head and framing included; `times[i]` is
    when they were read, and `lags[i]` how long they (the last of them) had lain in the kernel by then, NaN where it
    does not say. `t_end` is when the answer was complete, or the connection closed or failed.

    `end_lag` is the lag of the read with which the answer was complete, NaN where it is unknown: its bytes need not be
    those of an event. `send_blocked_s` is how much of t_sent - t_send was spent waiting for the kernel to take more.

    `connect_s` is what connecting took, None on a connection that was open already; `retries` counts the attempts
    to connect after the first. A request that never got a connection has t_send = t_sent: the moment when it would have
    been sent.
    """

    t_send: float
    t_sent: float
    t_end: float
    times: array[float] = field(repr=False)
    lags: array[float] = field(repr=False)
    pieces: list[bytes] = field(repr=False)
    failure: Failure | None
    connect_s: float | None = None
    retries: int = 0
    end_lag: float = math.nan
    send_blocked_s: float = 0.0
