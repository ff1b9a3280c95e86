"""Raw rows of requests with moments and counts chosen by hand, in the types that the store gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ddtree_bench.load import requests_table

Event = tuple[float, str, int | None]
"""A token-bearing event: moment, text, completion tokens so far (None without continuous usage)."""


def row(
    events: Sequence[Event],
    *,
    index: int = 0,
    t_send: float = 0.0,
    tokens: int | None = None,
    finish: float | None = None,
    status: str = "ok",
    spec: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A request; the finish_reason comes with the last event or, when `finish` is given, on its own at that moment.

    The stream closes 1 ms after its last event, as a usage event and [DONE] would have it.
    """
    times, kinds = [e[0] for e in events], ["token"] * len(events)
    ends = [False] * len(events)
    texts, so_far = [e[1] for e in events], [e[2] for e in events]
    if finish is not None:
        times, kinds, ends, texts, so_far = (
            [*times, finish],
            [*kinds, "finish"],
            [*ends, True],
            [*texts, ""],
            [*so_far, None],
        )
    elif ends:
        ends[-1] = True
    last = max(times, default=t_send)
    return {
        "index": index,
        "prompt_id": f"p{index}",
        "category": "code",
        "prompt_sha256": f"{index:064x}",
        "worker": 0,
        "max_tokens": 512,
        "intended_start": None,
        "t_send": t_send,
        "t_sent": t_send,
        "t_end": last + 0.001,
        "connect_s": None,
        "retries": 0,
        "event_times": [*times, last + 0.0005, last + 0.0005],
        "event_kinds": [*kinds, "usage", "done"],
        "event_texts": [*texts, "", ""],
        "event_lags": [0.0] * (len(times) + 2),
        "event_tokens": [*so_far, tokens, None],
        "event_tokenized": None,
        "event_finish": [*ends, False, False],
        "http_status": 200,
        "status": status,
        "error": None if status == "ok" else "it failed",
        "finish_reason": "length" if status == "ok" else None,
        "prompt_tokens": 5,
        "completion_tokens": tokens,
        "cached_prompt_tokens": 0,
        "spec": None if spec is None else json.dumps(spec),
        "text": "".join(texts),
    } | fields


def failed(status: str, index: int = 0, t_send: float = 0.0, **fields: Any) -> dict[str, Any]:
    """A request without any event."""
    empty: dict[str, Any] = {f"event_{name}": [] for name in ("times", "lags", "kinds", "texts", "tokens", "finish")}
    return row([], index=index, t_send=t_send, status=status, **empty | fields)


def steady_stream(n: int, gap: float, *, first: float = 0.1, t_send: float = 0.0, **fields: Any) -> dict[str, Any]:
    """An answer of n tokens, one an event, with equal gaps."""
    events = [(t_send + first + i * gap, "w ", i + 1) for i in range(n)]
    return row(events, t_send=t_send, tokens=n, **fields)


def details(histogram: Sequence[int], **fields: Any) -> dict[str, Any]:
    """spec_tokens_details with the sums that belong to a histogram of accepted drafts."""
    rounds = sum(histogram)
    return {
        "spec_verify_ct": rounds,
        "spec_num_correct_drafts": sum(k * n for k, n in enumerate(histogram)),
        "spec_num_proposed_drafts": rounds * (len(histogram) - 1),
        "spec_correct_drafts_histogram": list(histogram),
    } | fields


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    """Rows as the store gives them."""
    return requests_table.to_frame(rows)
