"""Tokens per second of a cell over its full time and its steady window, its peak, and the requests in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddtree_bench.metrics.answers import Answer
from ddtree_bench.metrics.percentiles import nearest_rank
from ddtree_bench.metrics.tokens import Row
from ddtree_bench.plan import Load

PEAK_WINDOW_S = 1.0
PEAK_LEAST_WALL_S = 3.0
"""A peak over one second says nothing about a cell that was hardly longer."""

STEADY_LEAST_SHARE = 0.5
"""Share of the tokens that the steady window must hold for figures to use it."""

WARM_UP_PERCENT = 90
"""The open loop has warmed up when this share of the requests that came at once would have ended."""

Window = tuple[float, float]
Throughput = dict[str, float | int | str | None]


def throughput(rows: Sequence[Row], answers: Sequence[Answer], load: Load) -> Throughput:
    """Return the throughputs of a cell, their windows, the peak and the speed of a user; see `definitions.CELL`.

    `answers` are those of the ok rows. Without one, or without the tokens of one, what needs them is None.
    """
    wall = wall_s(answers)
    window = steady_window(rows, answers, load)
    metrics: Throughput = {
        "wall_s": wall,
        "requests_per_s": len(answers) / wall if wall else None,
        "throughput_full_tok_s": None,
        "throughput_steady_tok_s": None,
        "throughput_window": None,
        "steady_window_s": None if window is None else window[1] - window[0],
        "steady_token_share": None,
        "peak_throughput_tok_s": None,
        "user_speed_tok_s": None,
    }
    counts = [given.tokens.counts for given in answers if given.tokens.counts is not None]
    if wall is None or len(counts) < len(answers):
        return metrics
    times, tokens = np.concatenate([given.times for given in answers]), np.concatenate(counts)
    metrics["throughput_full_tok_s"] = int(tokens.sum()) / wall if wall else None
    metrics["throughput_window"] = "full"
    metrics["peak_throughput_tok_s"] = peak_throughput(times, tokens) if wall >= PEAK_LEAST_WALL_S else None
    speeds = [given.user_speed_tok_s for given in answers if given.user_speed_tok_s is not None]
    metrics["user_speed_tok_s"] = math.fsum(speeds) / len(speeds) if speeds else None
    return metrics | (_steady(times, tokens, window) if window is not None else {})


def wall_s(answers: Sequence[Answer]) -> float | None:
    """Last e_m - first t0 over the ok requests, s."""
    if not answers:
        return None
    return float(max(given.times[-1] for given in answers) - min(given.t_send for given in answers))


def _steady(times: NDArray[np.float64], tokens: NDArray[np.int64], window: Window) -> Throughput:
    """Tokens of the events inside the window, both ends included, by its length."""
    inside, total = int(tokens[(times >= window[0]) & (times <= window[1])].sum()), int(tokens.sum())
    steady: Throughput = {
        "throughput_steady_tok_s": inside / (window[1] - window[0]),
        "steady_token_share": inside / total,
    }
    return steady | ({"throughput_window": "steady"} if inside >= STEADY_LEAST_SHARE * total else {})


def steady_window(rows: Sequence[Row], answers: Sequence[Answer], load: Load) -> Window | None:
    """Return the steady window of a cell, s; None when there is none.

    Closed loop: from the first to the last moment with all of `load.concurrency` requests in flight, those that failed
    among them: such a request keeps its place and brings no tokens, and the check `complete` says that there was one.

    Open loop: from the first start + warm-up to the last scheduled arrival, the warm-up being the time within which
    90 % of the ok requests end, from their scheduled start. A failed request keeps no other from its start.
    """
    window = full_house(rows, load.concurrency) if load.kind == "closed" else arrivals_window(rows, answers)
    return window if window is not None and window[1] > window[0] else None


def full_house(rows: Sequence[Row], concurrency: int) -> Window | None:
    """Return the first and the last moment with `concurrency` requests in flight, s; None if there were never so many.

    A request is in flight from when it was sent until its stream closed or failed.
    """
    moments, in_flight = _steps(rows)
    full = np.flatnonzero(in_flight >= concurrency)
    # in_flight[i] holds from moment i to moment i + 1, and is 0 after the last.
    return (float(moments[full[0]]), float(moments[full[-1] + 1])) if full.size else None


def arrivals_window(rows: Sequence[Row], answers: Sequence[Answer]) -> Window | None:
    """Return the steady window of an open loop, s; None without an ok request or a schedule."""
    starts = [float(row["intended_start"]) for row in rows if not pd.isna(row["intended_start"])]
    residence = [given.e2e_from_intended_s for given in answers if given.e2e_from_intended_s is not None]
    warm_up = nearest_rank(residence, WARM_UP_PERCENT)
    return None if warm_up is None else (min(starts) + warm_up, max(starts))


def peak_throughput(times: NDArray[np.float64], tokens: NDArray[np.int64]) -> float:
    """Return the most tokens in any half-open window of 1 s, per second.

    Tokens are counted, not events. floor(wall) + 1 such windows cover the cell, so the peak can never be below
    tokens / (floor(wall) + 1).
    """
    order = np.argsort(times, kind="stable")
    moments, before = times[order], np.concatenate([[0], np.cumsum(tokens[order])])
    ends = np.searchsorted(moments, moments + PEAK_WINDOW_S, side="left")
    return float((before[ends] - before[: len(moments)]).max() / PEAK_WINDOW_S)


def load_given(rows: Sequence[Row]) -> Throughput:
    """Return the requests that were in flight, mean and most, and the rate at which they were to arrive."""
    moments, in_flight = _steps(rows)
    busy = float(in_flight[:-1] @ np.diff(moments)) if moments.size else 0.0
    span = float(moments[-1] - moments[0]) if moments.size else 0.0
    return {
        "mean_in_flight": busy / span if span > 0 else None,
        "most_in_flight": int(in_flight.max()) if moments.size else None,
        "arrivals_per_s": _arrivals_per_s(rows),
    }


def _arrivals_per_s(rows: Sequence[Row]) -> float | None:
    starts = [float(row["intended_start"]) for row in rows if not pd.isna(row["intended_start"])]
    span = max(starts) - min(starts) if starts else 0.0
    return (len(starts) - 1) / span if span > 0 else None


def in_flight_at(rows: Sequence[Row], moments: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many requests were in flight at each of the moments, shape as `moments`."""
    starts, ends = _spans(rows)
    begun = np.searchsorted(np.sort(starts), moments, side="right")
    return begun - np.searchsorted(np.sort(ends), moments, side="right")


def _spans(rows: Sequence[Row]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each request was sent and when it ended; those that never found a connection were in flight at no time."""
    sent = [row for row in rows if not (row["status"] == "connect_error" and row["t_sent"] == row["t_send"])]
    return np.array([float(row["t_send"]) for row in sent]), np.array([float(row["t_end"]) for row in sent])


def _steps(rows: Sequence[Row]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The moments at which a request was sent or ended, and the number in flight from each on."""
    starts, ends = _spans(rows)
    moments = np.concatenate([starts, ends])
    steps = np.repeat(np.array([1, -1], dtype=np.int64), starts.size)
    order = np.lexsort((steps, moments))
    return moments[order], np.cumsum(steps[order])
