"""The commit of recurrent state after a verify, in torch.

`kernels/ops/mamba/mamba_state_scatter_triton.py:344` and its like refuse tensors that are on neither CUDA nor XPU. The
release has the same copy in torch beside them (`HybridLinearAttnBackend._scatter_speculative_state_with_mask`), which
it takes for the side states of some models when they are on a CPU.
"""

from __future__ import annotations


def commit_in_torch() -> None:
    """Let both copies, of recurrent states and of convolution windows, be the release's torch form. Safe to repeat."""
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    in_torch = hybrid_linear_attn_backend.HybridLinearAttnBackend._scatter_speculative_state_with_mask
    for module in (mamba_state_scatter_triton, hybrid_linear_attn_backend):
        module.fused_mamba_state_scatter_with_mask = in_torch
        module.fused_conv_window_scatter_with_mask = in_torch
