"""What a server says of itself in /server_info: what of it is recorded, and what of that lasts over its starts.

SGLang answers with all arguments that it was launched with, its keys among them; so what is not named here is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LASTING = (
    *("version", "model_path", "revision", "served_model_name", "device", "dtype", "quantization", "kv_cache_dtype"),
    *("load_format", "context_length", "max_context", "numerics", "bit_exact", "threads"),
    *("tp_size", "pp_size", "dp_size", "ep_size", "moe_dp_size", "attn_cp_size", "nnodes", "enable_dp_attention"),
    *("enable_dp_lm_head", "moe_dense_tp_size", "disable_custom_all_reduce", "disaggregation_mode"),
    *("max_running_requests", "max_queued_requests", "max_prefill_tokens", "chunked_prefill_size"),
    *("mem_fraction_static", "page_size", "cpu_offload_gb", "swa_full_tokens_ratio", "schedule_policy"),
    *("schedule_conservativeness", "prefill_max_requests", "enable_mixed_chunk", "num_continuous_decode_steps"),
    *("stream_interval", "disable_radix_cache", "radix_eviction_policy", "enable_hierarchical_cache"),
    *("disable_overlap_schedule", "enable_single_batch_overlap", "enable_two_batch_overlap"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "mm_attention_backend"),
    *("sampling_backend", "grammar_backend", "fp8_gemm_runner_backend", "fp4_gemm_runner_backend"),
    *("moe_runner_backend", "moe_a2a_backend", "deepep_mode", "enable_eplb", "ep_num_redundant_experts"),
    *("linear_attn_backend", "mamba_backend", "mamba_ssm_dtype", "mamba_scheduler_strategy", "mamba_track_interval"),
    *("disable_cuda_graph", "disable_cuda_graph_padding", "cuda_graph_max_bs", "cuda_graph_bs"),
    *("disable_piecewise_cuda_graph", "enable_torch_compile", "torch_compile_max_bs", "torchao_config"),
    *("enable_deterministic_inference", "enable_lora", "enable_metrics", "enable_cache_report", "decode_log_interval"),
    *("tokenizer_worker_num", "skip_tokenizer_init", "reasoning_parser", "frontend"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_draft_model_quantization", "speculative_num_steps", "speculative_eagle_topk"),
    *("speculative_num_draft_tokens", "speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
    *("speculative_attention_mode", "speculative_draft_attention_backend", "speculative_draft_window_size"),
    *("speculative_dflash_block_size", "speculative_ddtree_budget", "speculative_ddtree_topk_cap", "enable_spec_v2"),
)
"""What stays the same from one start to the next while the launch stays the same: a host key is made of these.

What a server works out from the memory that happens to be free (max_total_num_tokens) or draws (random_seed) does not.
"""

OF_A_START = (
    *("start_id", "ddtree_start_id", "pid", "load_seconds", "self_test", "random_seed", "max_total_num_tokens"),
    *("max_req_input_len", "status", "last_gen_throughput"),
)
"""What is recorded beside it: it may differ from start to start."""

HIDDEN = "(key)"
"""Stands for a key wherever a server has told one back."""

SHORTEST_SECRET = 6
"""Characters. Stand-ins such as `EMPTY` are no secrets."""


def lasting(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of /server_info that is LASTING."""
    return {name: info[name] for name in LASTING if name in info}


def kept(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of /server_info that may be recorded."""
    return {name: info[name] for name in (*LASTING, *OF_A_START) if name in info}


def hide(value: Any, secrets: Iterable[str]) -> Any:
    """Return a value of plain JSON types, or bytes, with every secret in its texts taken out.

    What is shorter than SHORTEST_SECRET is none: it would be found everywhere.

    >>> hide({"errors": ["no key sk-123456"], "n": 1}, ["sk-123456"])
    {'errors': ['no key (key)'], 'n': 1}
    """
    words = sorted({secret for secret in secrets if len(secret) >= SHORTEST_SECRET}, key=len, reverse=True)
    return _hide(value, words) if words else value


def _hide(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, bytes):
        for secret in secrets:
            value = value.replace(secret.encode(), HIDDEN.encode())
        return value
    if isinstance(value, Mapping):
        return {key: _hide(part, secrets) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(part, secrets) for part in value]
    return value
