"""Metrics of a cell: one server run x one workload x one load point."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddtree_bench.load.requests_table import STATUSES
from ddtree_bench.metrics.answers import Answer
from ddtree_bench.metrics.parsed import Requests, parse
from ddtree_bench.metrics.percentiles import summary
from ddtree_bench.metrics.slos import Slos, goodput
from ddtree_bench.metrics.speculation import (
    Details,
    cell_speculation,
    depth_probabilities,
    with_counted_trees,
)
from ddtree_bench.metrics.throughput import load_given, throughput
from ddtree_bench.metrics.tokens import Row, received
from ddtree_bench.plan import Load

_OF_ROUNDS = ("accept_length", "accept_length_rounds", "accept_length_macro", "identity_broken")
"""Has no meaning where there are no rounds."""

Scalars = dict[str, float | int | str | bool | None]


def cell_metrics(
    requests: Requests,
    load: Load,
    method: str | None,
    slos: Slos | None = None,
    counters: Mapping[str, float] | None = None,
) -> Scalars:
    """Return the metrics of a cell by name; `definitions.CELL` says what each is.

    Parameters
    ----------
    requests : DataFrame or parsed requests
        Raw rows of the cell, columns as in requests_table.SCHEMA, or what `parse` made of them.
    load : Load
        The load that was to be given.
    method : str or None
        AR, DFLASH or DDTREE; None when not known, which is AR where the server says that there were no rounds. An AR
        cell with rounds is given what they did: the check `method` says that it is none.
    slos : Slos, optional
        The objectives of goodput.
    counters : mapping, optional
        Differences of the server's counters over the cell, for what its answers do not tell of: retractions, each of
        which brings a token that no round committed, and the trees.

    Only ok requests enter a throughput or a latency; the others are counted by kind. The keys are always the same: with
    no ok request, or without what a metric needs, its value is None. The order of the requests changes nothing.
    """
    parsed = sorted(parse(requests), key=lambda one: int(one.row["index"]))
    rows = [one.row for one in parsed]
    answered = [(one.row, one.answer, one.details) for one in parsed if one.answer is not None]
    ok, answers = [row for row, _, _ in answered], [given for _, given, _ in answered]
    specs = [spec for _, _, spec in answered]
    counted = counters or {}
    untold = _untold(specs, counted.get("retractions_total"), complete=len(ok) == len(rows))
    speculation = cell_speculation(specs, [given.tokens.total for given in answers], untold)
    speculation = with_counted_trees(speculation, counted)
    without_rounds = speculation["rounds"] == 0 if method is None else method == "AR" and not speculation["rounds"]
    if without_rounds:
        speculation |= dict.fromkeys(_OF_ROUNDS)
    return {
        **_counts(rows, ok),
        **_tokens(rows, ok, answers),
        **throughput(rows, answers, load),
        **goodput(answers, len(rows), slos),
        **load_given(rows),
        **_latencies(answers),
        **speculation,
        **_times(answers, 1.0 if without_rounds else speculation["accept_length"]),
    }


def _untold(specs: Sequence[Details], retractions: float | None, complete: bool) -> int | None:
    """Retractions that the answers do not tell of; None when they may have been those of requests that failed."""
    if not retractions or all(spec.retractions is not None for spec in specs):
        return 0
    return round(retractions) if complete else None


def acceptance_by_depth(requests: Requests) -> pd.DataFrame:
    """Return P(at least d drafts of a round are accepted) for each depth d from 1, pooled over the ok requests.

    Columns depth (int), probability (float, sum of h[k] over k >= d by the sum of h), rounds (int, the sum of h). Empty
    when no request has a histogram.
    """
    specs = [one.details for one in parse(requests) if one.answer is not None]
    probabilities, rounds = depth_probabilities(specs)
    depths = np.arange(1, len(probabilities) + 1)
    columns = {"depth": depths, "probability": np.array(probabilities, dtype=float), "rounds": rounds}
    return pd.DataFrame(columns).astype({"depth": "int64", "rounds": "int64"})


def _counts(rows: Sequence[Row], ok: Sequence[Row]) -> Scalars:
    reasons = [row["finish_reason"] for row in ok]
    statuses = [row["status"] for row in rows]
    by_length, by_stop = reasons.count("length"), reasons.count("stop")
    return {
        "requests": len(rows),
        **{f"requests_{status}": statuses.count(status) for status in STATUSES},
        "finished_by_length": by_length,
        "finished_by_stop": by_stop,
        "finished_by_other": len(ok) - by_length - by_stop,
    }


def _tokens(rows: Sequence[Row], ok: Sequence[Row], answers: Sequence[Answer]) -> Scalars:
    known = [given.tokens.total for given in answers if given.tokens.total is not None]
    complete = bool(known) and len(known) == len(answers)
    return {
        "output_tokens": sum(known) if complete else None,
        "output_tokens_all_requests": _sum(received(row)[0] for row in rows) if rows else 0,
        "output_length_mean": sum(known) / len(known) if complete else None,
        "output_length_min": min(known) if complete else None,
        "output_length_max": max(known) if complete else None,
        "token_source": _agreed(given.tokens.source for given in answers),
        "n_source": _agreed(given.tokens.n_source for given in answers),
        "prompt_tokens": _sum(row["prompt_tokens"] for row in ok),
        "cached_prompt_tokens": _sum(row["cached_prompt_tokens"] for row in ok),
        "texts_sha256": _texts_sha256(rows) if len(ok) == len(rows) else None,
    }


def _texts_sha256(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(hashlib.sha256(row["text"].encode()).digest())
    return digest.hexdigest()


def _latencies(answers: Sequence[Answer]) -> dict[str, float | None]:
    itl = [given.itl_s() for given in answers]
    values = np.concatenate([latencies for latencies, _ in itl]) if itl else np.empty(0)
    weights = np.concatenate([tokens for _, tokens in itl]) if itl else np.empty(0)
    return {
        **summary("ttft", [given.ttft_s for given in answers]),
        **summary("e2e", [given.e2e_s for given in answers]),
        **summary("ttft_from_intended", _known(given.ttft_from_intended_s for given in answers)),
        **summary("e2e_from_intended", _known(given.e2e_from_intended_s for given in answers)),
        **summary("tpot", _known(given.tpot_s for given in answers)),
        **summary("itl", values, weights),
        **summary("icl", np.concatenate([given.icl_s for given in answers]) if answers else []),
    }


def _times(answers: Sequence[Answer], tokens_per_round: float | None) -> Scalars:
    """Decode time by token and by round, pooled over the requests that have one.

    A round commits accept_length tokens on average (an AR step commits one), so speed-up of decoding over AR = accept
    length x (AR step time / round time) holds exactly, also when first events bundle several tokens. An answer
    that came in one piece, as over a link that bundles events, has no decode time: it is left out.
    """
    timed = [(given.decode_s, n) for given in answers if (n := given.decode_tokens) is not None and given.decode_s > 0]
    tokens = sum(n for _, n in timed)
    per_token = math.fsum(seconds for seconds, _ in timed) / tokens if tokens else None
    return {
        "decode_s_per_token": per_token,
        "round_time_s": None if per_token is None or tokens_per_round is None else per_token * tokens_per_round,
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _agreed(values: Iterable[str | None]) -> str | None:
    """The value that all share, "mixed" when they differ, None as soon as one is missing."""
    found = set(values)
    if not found or None in found:
        return None
    return "mixed" if len(found) > 1 else found.pop()


def _sum(values: Iterable[Any]) -> int | None:
    """The sum, None as soon as one value is missing."""
    known = list(values)
    return None if not known or any(pd.isna(value) for value in known) else sum(int(value) for value in known)
