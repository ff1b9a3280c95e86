"""Metrics of a cell: one server run x one workload x one load point."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddtree_bench.load.requests_table import STATUSES
from ddtree_bench.metrics.answers import Answer, Row, answer
from ddtree_bench.metrics.percentiles import summary
from ddtree_bench.metrics.speculation import cell_speculation, details

PEAK_WINDOW_S = 1.0
PEAK_LEAST_WALL_S = 3.0
"""A peak over one second says nothing about a cell that was hardly longer."""

STEADY_LEAST_SHARE = 0.5
"""Share of the tokens that the steady window must hold for figures to use it."""

_OF_ROUNDS = ("accept_length", "accept_length_rounds", "accept_length_macro", "identity_broken")
"""Has no meaning for AR, which has no rounds."""

Scalars = dict[str, float | int | str | bool | None]


def cell_metrics(requests: pd.DataFrame, concurrency: int, method: str) -> Scalars:
    """Return the metrics of a cell by name; `definitions.CELL` says what each is.

    Parameters
    ----------
    requests : DataFrame
        Raw rows of the cell, columns as in requests_table.SCHEMA.
    concurrency : int
        Requests that were to be kept in flight.
    method : str
        AR, DFLASH or DDTREE.

    Only ok requests enter a throughput or a latency; the others are counted by kind. The keys are always the same: with
    no ok request, or without what a metric needs, its value is None.
    """
    rows = requests.to_dict("records")
    answered = [(given, row) for row in rows if (given := answer(row)) is not None]
    answers, ok = [given for given, _ in answered], [row for _, row in answered]
    specs = [details(row) for row in ok]
    speculation = cell_speculation(specs, [given.tokens for given in answers])
    if method == "AR":
        speculation |= dict.fromkeys(_OF_ROUNDS)
    return {
        **_counts(rows, ok),
        **_tokens(rows, ok, answers),
        **_throughput(rows, answers, concurrency),
        **_in_flight(rows),
        **_latencies(answers),
        **speculation,
        **_times(answers, method, speculation["accept_length"]),
    }


def _counts(rows: Sequence[Row], ok: Sequence[Row]) -> Scalars:
    reasons = [row["finish_reason"] for row in ok]
    counts: Scalars = {"requests": len(rows)}
    counts |= {f"requests_{status}": sum(row["status"] == status for row in rows) for status in STATUSES}
    by_length, by_stop = reasons.count("length"), reasons.count("stop")
    counts |= {"finished_by_length": by_length, "finished_by_stop": by_stop}
    counts |= {"finished_by_other": len(ok) - by_length - by_stop}
    return counts


def _tokens(rows: Sequence[Row], ok: Sequence[Row], answers: Sequence[Answer]) -> Scalars:
    lengths = [given.tokens for given in answers]
    known = [n for n in lengths if n is not None]
    complete = bool(known) and len(known) == len(lengths)
    return {
        "output_tokens": sum(known) if complete else None,
        "output_tokens_all_requests": _received(rows),
        "output_length_mean": sum(known) / len(known) if complete else None,
        "output_length_min": min(known) if complete else None,
        "output_length_max": max(known) if complete else None,
        "token_source": "usage" if complete else None,
        "n_source": _agreed(given.n_source for given in answers),
        "prompt_tokens": _sum(row["prompt_tokens"] for row in ok),
        "cached_prompt_tokens": _sum(row["cached_prompt_tokens"] for row in ok),
        "texts_sha256": _texts_sha256(rows) if len(ok) == len(rows) else None,
    }


def _received(rows: Sequence[Row]) -> int | None:
    """Tokens of all requests, failed ones too, to hold against the server's counter.

    A request without any token-bearing event received none; one with such events and no usage makes the sum unknown.
    """
    counts: list[int] = []
    for row in rows:
        if not pd.isna(row["completion_tokens"]):
            counts.append(int(row["completion_tokens"]))
        elif "token" in list(row["event_kinds"]):
            return None
    return sum(counts)


def _texts_sha256(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in sorted(rows, key=lambda row: row["index"]):
        digest.update(hashlib.sha256(row["text"].encode()).digest())
    return digest.hexdigest()


def _throughput(rows: Sequence[Row], answers: Sequence[Answer], concurrency: int) -> Scalars:
    wall = max(a.times[-1] for a in answers) - min(a.t_send for a in answers) if answers else None
    # A failed request keeps its slot until a time limit and brings no tokens: no steady state is to be seen beside it.
    window = steady_window(rows, concurrency) if len(answers) == len(rows) else None
    metrics: Scalars = {
        "wall_s": None if wall is None else float(wall),
        "throughput_full_tok_s": None,
        "throughput_steady_tok_s": None,
        "throughput_window": None,
        "steady_window_s": None if window is None else window[1] - window[0],
        "steady_token_share": None,
        "peak_throughput_tok_s": None,
        "user_speed_tok_s": None,
    }
    if wall is None or any(given.counts is None for given in answers):
        return metrics
    times = np.concatenate([given.times for given in answers])
    tokens = np.concatenate([given.counts for given in answers if given.counts is not None])
    total = int(tokens.sum())
    metrics["throughput_full_tok_s"] = total / wall if wall > 0 else None
    metrics["throughput_window"] = "full"
    metrics["peak_throughput_tok_s"] = peak_throughput(times, tokens) if wall >= PEAK_LEAST_WALL_S else None
    speeds = [a.user_speed_tok_s for a in answers if a.user_speed_tok_s is not None]
    metrics["user_speed_tok_s"] = float(np.mean(speeds)) if speeds else None
    if window is not None and total and window[1] > window[0]:
        inside = int(tokens[(times >= window[0]) & (times <= window[1])].sum())
        metrics["throughput_steady_tok_s"] = inside / (window[1] - window[0])
        metrics["steady_token_share"] = inside / total
        if inside >= STEADY_LEAST_SHARE * total:
            metrics["throughput_window"] = "steady"
    return metrics


def steady_window(rows: Sequence[Row], concurrency: int) -> tuple[float, float] | None:
    """Return the first and the last moment with `concurrency` requests in flight, s; None if there were never so many.

    A request is in flight from when it was sent until its stream closed or failed.
    """
    moments, in_flight = _steps(rows)
    full = np.flatnonzero(in_flight >= concurrency)
    # in_flight[i] holds from moment i to moment i + 1, and is 0 after the last.
    return (float(moments[full[0]]), float(moments[full[-1] + 1])) if full.size else None


def _steps(rows: Sequence[Row]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The moments at which a request was sent or ended, and the number in flight from each on."""
    starts, ends = [float(row["t_send"]) for row in rows], [float(row["t_end"]) for row in rows]
    moments = np.array(starts + ends)
    steps = np.repeat(np.array([1, -1], dtype=np.int64), len(rows))
    order = np.lexsort((steps, moments))
    return moments[order], np.cumsum(steps[order])


def peak_throughput(times: NDArray[np.float64], tokens: NDArray[np.int64]) -> float:
    """Return the most tokens in any half-open window of 1 s, per second.

    Tokens are counted, not events. floor(wall) + 1 such windows cover the cell, so the peak can never be below
    tokens / (floor(wall) + 1).
    """
    order = np.argsort(times, kind="stable")
    moments, before = times[order], np.concatenate([[0], np.cumsum(tokens[order])])
    ends = np.searchsorted(moments, moments + PEAK_WINDOW_S, side="left")
    return float((before[ends] - before[: len(moments)]).max() / PEAK_WINDOW_S)


def _in_flight(rows: Sequence[Row]) -> Scalars:
    moments, in_flight = _steps(rows)
    span = float(moments[-1] - moments[0]) if len(rows) else 0.0
    busy = math.fsum(float(row["t_end"]) - float(row["t_send"]) for row in rows)
    return {
        "mean_in_flight": busy / span if span > 0 else None,
        "most_in_flight": int(in_flight.max()) if len(rows) else None,
    }


def _latencies(answers: Sequence[Answer]) -> dict[str, float | None]:
    itl = [given.itl_s() for given in answers]
    values = np.concatenate([latencies for latencies, _ in itl]) if itl else np.empty(0)
    weights = np.concatenate([tokens for _, tokens in itl]) if itl else None
    return {
        **summary("ttft", [given.ttft_s for given in answers]),
        **summary("e2e", [given.e2e_s for given in answers]),
        **summary("tpot", [given.tpot_s for given in answers if given.tpot_s is not None]),
        **summary("itl", values, weights if values.size else None),
        **summary("icl", np.concatenate([given.icl_s for given in answers]) if answers else []),
    }


def _times(answers: Sequence[Answer], method: str, accept_length: float | None) -> Scalars:
    """Decode time by token and by round, pooled over the requests that have one.

    A round commits accept_length tokens on average (an AR step commits one), so speed-up of decoding over AR = accept
    length x (AR step time / round time) holds exactly, also when first events bundle several tokens.
    """
    timed = [(given.decode_s, given.decode_tokens) for given in answers if given.decode_tokens is not None]
    tokens = sum(n for _, n in timed if n is not None)
    per_token = math.fsum(seconds for seconds, _ in timed) / tokens if tokens else None
    per_round = 1.0 if method == "AR" else accept_length
    return {
        "decode_s_per_token": per_token,
        "round_time_s": None if per_token is None or per_round is None else per_token * per_round,
    }


def _agreed(values: Any) -> str | None:
    """The value that all share, "mixed" when they differ, None as soon as one is missing."""
    found = set(values)
    if not found or None in found:
        return None
    return "mixed" if len(found) > 1 else str(found.pop())


def _sum(values: Any) -> int | None:
    """The sum, None as soon as one value is missing."""
    known = list(values)
    return None if not known or any(pd.isna(value) for value in known) else sum(int(value) for value in known)
