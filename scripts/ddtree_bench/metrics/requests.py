"""Metrics of single requests."""

from __future__ import annotations

import hashlib
from typing import Any

import pandas as pd

from ddtree_bench.metrics.answers import Answer, Row, answer
from ddtree_bench.metrics.percentiles import summary
from ddtree_bench.metrics.speculation import details, request_speculation

_COPIED = (
    "index",
    "prompt_id",
    "category",
    "prompt_sha256",
    "worker",
    "max_tokens",
    "status",
    "error",
    "http_status",
    "finish_reason",
    "prompt_tokens",
    "cached_prompt_tokens",
)


def request_metrics(requests: pd.DataFrame) -> pd.DataFrame:
    """Return one row of scalars a request, in the order of the raw rows; see `definitions.REQUEST`.

    Latencies are NA for requests whose status is not ok.
    """
    rows = [_row(raw) for raw in requests.to_dict("records")]
    return pd.DataFrame(rows, columns=[*_COPIED, *_columns()])


def _row(raw: Row) -> dict[str, Any]:
    given = answer(raw)
    tokens = given.tokens if given else _known(raw["completion_tokens"])
    return (
        {name: _known(raw[name]) for name in _COPIED}
        | _latencies(given, _known(raw["intended_start"]))
        | {
            "output_tokens": tokens,
            "token_source": None if tokens is None else "usage",
            "text_sha256": hashlib.sha256(raw["text"].encode()).hexdigest(),
        }
        | request_speculation(details(raw), tokens)
    )


def _latencies(given: Answer | None, intended_start: float | None) -> dict[str, Any]:
    if given is None:
        return {}
    itl, weights = given.itl_s()
    late = None if intended_start is None else given.t_send - intended_start
    return {
        "n1": given.n1,
        "n1_source": given.n_source,
        "token_events": len(given.times),
        "ttft_s": given.ttft_s,
        "e2e_s": given.e2e_s,
        "tpot_s": given.tpot_s,
        "ttft_from_intended_s": None if late is None else given.ttft_s + late,
        "e2e_from_intended_s": None if late is None else given.e2e_s + late,
        "user_speed_tok_s": given.user_speed_tok_s,
        **summary("itl", itl, weights if itl.size else None),
        **summary("icl", given.icl_s),
    }


def _columns() -> list[str]:
    """Names of the columns that are computed, in their order."""
    latencies = ["ttft_s", "e2e_s", "tpot_s", "ttft_from_intended_s", "e2e_from_intended_s", "user_speed_tok_s"]
    spread = [*summary("itl", []), *summary("icl", [])]
    sources = ["output_tokens", "token_source", "n1", "n1_source", "token_events"]
    return [*sources, *latencies, *spread, *request_speculation(details({"spec": None}), None), "text_sha256"]


def _known(value: Any) -> Any:
    """The value, or None where the frame has one of pandas' marks for a missing one."""
    return None if pd.isna(value) else value
