"""Metrics of single requests."""

from __future__ import annotations

import hashlib
from typing import Any

import pandas as pd

from ddtree_bench.metrics import definitions
from ddtree_bench.metrics.answers import Answer
from ddtree_bench.metrics.parsed import Request, Requests, parse
from ddtree_bench.metrics.percentiles import summary
from ddtree_bench.metrics.speculation import request_speculation
from ddtree_bench.metrics.tokens import received

_COPIED = (
    "index",
    "prompt_id",
    "category",
    "prompt_sha256",
    "worker",
    "max_tokens",
    "retries",
    "status",
    "error",
    "http_status",
    "finish_reason",
    "prompt_tokens",
    "cached_prompt_tokens",
)

_TYPES = {"text": "object", "int": "Int64", "float": "float64", "bool": "boolean"}


def request_metrics(requests: Requests) -> pd.DataFrame:
    """Return one row of scalars a request, in the order of the raw rows; see `definitions.REQUEST`.

    Latencies are NA for requests whose status is not ok. Integers are Int64, so that they stay such beside an NA.
    """
    frame = pd.DataFrame([_row(one) for one in parse(requests)], columns=list(definitions.REQUEST), dtype=object)
    return frame.astype({name: _TYPES[kind] for name, (kind, _, _) in definitions.REQUEST.items()})


def _row(one: Request) -> dict[str, Any]:
    tokens, source = received(one.row)
    return (
        {name: _known(one.row[name]) for name in _COPIED}
        | {"output_tokens": tokens, "token_source": source}
        | (_of_answer(one.answer) if one.answer is not None else {})
        | request_speculation(one.details, tokens)
        | {"text_sha256": hashlib.sha256(one.row["text"].encode()).hexdigest()}
    )


def _of_answer(given: Answer) -> dict[str, Any]:
    return {
        "n1": given.tokens.n1,
        "n1_source": given.tokens.n_source,
        "token_events": len(given.times),
        "ttft_s": given.ttft_s,
        "e2e_s": given.e2e_s,
        "tpot_s": given.tpot_s,
        "ttft_from_intended_s": given.ttft_from_intended_s,
        "e2e_from_intended_s": given.e2e_from_intended_s,
        "user_speed_tok_s": given.user_speed_tok_s,
        **summary("itl", *given.itl_s()),
        **summary("icl", given.icl_s),
    }


def _known(value: Any) -> Any:
    """The value, or None where the frame has one of pandas' marks for a missing one."""
    return None if pd.isna(value) else value
