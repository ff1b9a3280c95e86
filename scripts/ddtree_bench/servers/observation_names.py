"""The names of what a server can tell, each with its unit and meaning, whatever the engine."""

from __future__ import annotations

from collections.abc import Mapping

TOTALS: Mapping[str, str] = {
    "requests_total": "requests",
    "aborted_requests_total": "requests that were cancelled or aborted",
    "prompt_tokens_total": "prompt tokens, those from the prefix cache included",
    "cached_tokens_total": "of these, those from the prefix cache",
    "generation_tokens_total": "output tokens",
    "verify_calls_total": "rounds, each request's counted apart",
    "accepted_drafts_total": "accepted drafts, the bonus not counted",
    "proposed_drafts_total": "drafts that rounds verified",
    "tree_rounds_total": "rounds with a tree, each request's counted apart",
    "tree_nodes_total": "nodes of these trees, roots not counted",
    "tree_branching_nodes_total": "of these and the roots, those with two children or more",
    "draft_seconds_total": "s in the draft model's forwards",
    "head_topk_seconds_total": "s in the head's candidates",
    "tree_seconds_total": "s in building trees",
    "verify_seconds_total": "s in verifying trees: the target's forward, the walk, the move of the KV",
    "commit_seconds_total": "s in the drafter's KV cache, after the verify",
    "retractions_total": "requests that a full cache put back into the queue",
    "realtime_decode_tokens_total": "tokens that decode steps committed, the prefill's not counted",
    "realtime_prefill_tokens_total": "prompt tokens that were computed",
    "realtime_cached_tokens_total": "prompt tokens from the cache, as they are used",
    "decode_graph_passes_total": "decode steps that ran in a CUDA graph",
    "decode_eager_passes_total": "decode steps that did not",
    "prefill_graph_passes_total": "prefill steps that ran in a CUDA graph",
    "prefill_eager_passes_total": "prefill steps that did not",
}
"""Counts since the server's start: their difference over a cell is what the cell did."""

MOMENTS: Mapping[str, str] = {
    "running_requests": "requests that run",
    "queued_requests": "requests that wait",
    "max_running_requests": "requests that may run at once",
    "verify_width": "tokens a verify pass takes",
    "accept_length_interval": "tokens a round in the server's last report, the prefill's not counted",
    "accept_rate_interval": "accepted / proposed drafts in the server's last report",
    "accept_length_lifetime": "tokens a round since the server's start, the prefill's not counted",
    "verify_graph_memory_gb": "GB of the verify passes' CUDA graphs",
}
"""Values of now, settings, and averages: they have no difference."""
