"""Which requests a DDTREE server takes."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_exec


def seeded() -> bool:
    """Whether every request of this server is drawn by a seed, its own or a default one."""
    return bool(get_exec().deterministic.enable_deterministic_inference)


def refuse(message: str | None, req: Any, _enable_overlap: bool) -> str | None:
    """Why a request is refused with HTTP 400, or None: what would change its text without anyone's notice.

    Penalties change with every token, so each node of a tree would need those of its own path; SGLang's tree
    verification applies those of the round's start to all of them, and the text would differ from AR's. Logprobs,
    grammars, logit bias, min-p and seeds are served.
    """
    if message is not None:
        return message.replace("DFLASH", "DDTREE")
    params = req.sampling_params
    refused = {
        "frequency_penalty": params.frequency_penalty != 0,
        "presence_penalty": params.presence_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "min_new_tokens": params.min_new_tokens > 0,
        "custom_logit_processor": req.custom_logit_processor is not None,
        "return_hidden_states": bool(req.return_hidden_states),
        # SGLang's seeded sampler has no min-p: AR's server ends at such a request.
        "min_p with --enable-deterministic-inference": params.min_p > 0 and seeded(),
        # Kept by slot of the KV cache, and not moved with the accepted path.
        "return_routed_experts": bool(req.return_routed_experts),
        "return_indexer_topk": bool(req.return_indexer_topk),
        "return_sampling_mask": bool(req.return_sampling_mask),
    }
    found = [name for name, present in refused.items() if present]
    if not found:
        return None
    return f"DDTREE speculative decoding does not support {', '.join(found)}: leave it out, or ask a server without it."
