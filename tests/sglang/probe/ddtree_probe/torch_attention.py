"""The extend attention of SGLang's Triton backend in plain torch, for tests with more rounds than Triton's interpreter
can run: it spends about 20 ms on every head of every request of every layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.attention import extend_attention
from torch import Tensor


def extend_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    is_causal: bool,
    mask_indptr: Tensor | None,
    _max_extend: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sm_scale: float | None = None,
    **others: Any,
) -> None:
    """As of the kernel of this name: `q`, `k`, `v`, `out` [rows, heads, width] of all requests, one behind another.

    Raises NotImplementedError for what the micro models do not use.
    """
    used = {name: value for name, value in others.items() if name in ("logit_cap", "sliding_window_size") and value > 0}
    if used or others.get("sinks") is not None or k_scale != 1 or v_scale != 1:
        raise NotImplementedError(f"torch attention with {used}, sinks or scales")
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    rows, past = qo_indptr.tolist(), kv_indptr.tolist()
    masks = None if custom_mask is None else mask_indptr.tolist()
    flat_k, flat_v = (buffer.view(-1, *buffer.shape[-2:]) for buffer in (k_buffer, v_buffer))
    for request in range(len(rows) - 1):
        new = slice(rows[request], rows[request + 1])
        slots = kv_indices[past[request] : past[request + 1]].long()
        keys, values = torch.cat((flat_k[slots], k[new])), torch.cat((flat_v[slots], v[new]))
        n, total = new.stop - new.start, len(keys)
        if masks is not None:
            seen = custom_mask[masks[request] : masks[request] + n * total].view(n, total).bool().clone()
            seen[:, : len(slots)] = True  # the kernel is told to skip the mask there
        elif is_causal:
            seen = torch.ones(n, total, dtype=torch.bool).tril(len(slots))
        else:
            seen = torch.ones(n, total, dtype=torch.bool)
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("nhd,mhd->hnm", q[new], keys.repeat_interleave(groups, 1)) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[new] = torch.einsum("hnm,mhd->nhd", weights, values.repeat_interleave(groups, 1))


def install() -> None:
    """Take the kernel's place; attention backends look it up when they are made."""
    extend_attention.extend_attention_fwd = extend_attention_fwd
