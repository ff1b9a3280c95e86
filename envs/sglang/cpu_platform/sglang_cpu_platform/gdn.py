"""Gated delta net layers in float32 on a CPU.

`kernels/ops/attention/fla/chunk.py:194` refuses float32, for which its Triton kernels need too much shared memory on a
GPU. Triton's interpreter has no such limit, and bfloat16, which the check asks for, it computes wrongly. So prefill
calls the same kernels behind the check. The gated norm sizes its grid by the number of CUDA's multiprocessors
(`fla/layernorm_gated.py:217`).
"""

from __future__ import annotations

from typing import Any

import torch


def allow_float32_on_cpu() -> None:
    """Let gated delta net layers run in float32 on a CPU. Safe to repeat."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    layernorm_gated._get_sm_count = _one_processor
    gdn_triton.chunk_gated_delta_rule = chunk_gated_delta_rule


def chunk_gated_delta_rule(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    inplace_update: bool,
) -> tuple[torch.Tensor, None, Any]:
    """Call SGLang's own kernels as `fla.chunk.chunk_gated_delta_rule` does; shapes and results are described there.

    Raises:
        ValueError: `head_first`, which the release deprecates and no caller sets.
    """
    from sglang.kernels.ops.attention.fla.chunk import ChunkGatedDeltaRuleFunction

    if head_first:
        raise ValueError("head_first=True: queries, keys and values must be [batch, tokens, heads, dim]")
    out, states = ChunkGatedDeltaRuleFunction.apply(
        q,
        k,
        v,
        g,
        beta,
        k.shape[-1] ** -0.5,
        initial_state,
        initial_state_indices,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        inplace_update,
    )
    return out, None, states


def _one_processor(device: torch.device) -> int:  # noqa: ARG001
    return 1
