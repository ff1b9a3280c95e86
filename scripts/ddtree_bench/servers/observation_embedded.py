"""What the embedded engine says of itself: its counters, or as far as these lack, its Prometheus text."""

from __future__ import annotations

import math
from typing import Any

from ddtree_bench.servers import prometheus_text
from ddtree_bench.servers.observation_names import MOMENTS, TOTALS
from ddtree_bench.servers.pages import Unanswered

_KEYS = {
    "requests_total": "sglang:num_requests_total",
    "aborted_requests_total": "sglang:num_aborted_requests_total",
    "prompt_tokens_total": "sglang:prompt_tokens_total",
    "cached_tokens_total": "sglang:cached_tokens_total",
    "generation_tokens_total": "sglang:generation_tokens_total",
    "verify_calls_total": "sglang:spec_verify_calls_total",
    "running_requests": "sglang:num_running_reqs",
    "queued_requests": "sglang:num_queue_reqs",
    # Of the server's life here, where SGLang's text has that of its last report.
    "accept_length_lifetime": "sglang:spec_accept_length",
}
_NO_ROUNDS = "accept_length_lifetime"


def read(told: dict[str, Any], text: str | Unanswered) -> tuple[dict[str, float], dict[str, str]]:
    """Return the values and why others are missing; `told` is /server_info with `counters`, `text` that of /metrics."""
    values = {} if isinstance(text, Unanswered) else from_text(text)
    values |= {name: float(count) for name, count in told["counters"].items() if _is_number(count)}
    values |= {name: float(value) for name, value in _settings(told).items() if _is_number(value)}
    missing = {name: _why(name, told) for name in (*TOTALS, *MOMENTS) if name not in values}
    return values, missing


def _settings(told: dict[str, Any]) -> dict[str, Any]:
    states = told.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    return {
        "verify_width": told.get("speculative_num_draft_tokens"),
        "max_running_requests": told.get("max_running_requests"),
        "accept_length_lifetime": state.get("avg_spec_accept_length"),
    }


def from_text(text: str) -> dict[str, float]:
    """Return what the engine's Prometheus text says; nothing from a text that is none."""
    try:
        found = prometheus_text.parse(text)
    except ValueError:
        return {}
    sums = {name: prometheus_text.over_ranks(found.get(key, [])) for name, key in _KEYS.items()}
    return {name: value for name, value in sums.items() if value is not None and (value or name != _NO_ROUNDS)}


def _why(name: str, told: dict[str, Any]) -> str:
    speculates = told.get("speculative_algorithm") is not None
    if name in ("verify_width", "accept_length_lifetime") and not speculates:
        return "the server does not speculate"
    return "no round was verified yet" if name == "accept_length_lifetime" else "the embedded engine has no such number"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
