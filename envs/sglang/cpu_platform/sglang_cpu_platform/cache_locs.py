"""The KV slots of a run of tokens, in torch.

`kernels/ops/speculative/cache_locs.py:assign_extend_cache_locs_func` has a kernel for each device it knows and returns
None for any other, so that an out-of-tree platform must bring its own.
"""

from __future__ import annotations

import torch


def speculative_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Look up the KV slots of the `draft_token_num` positions from `start_offset` on, for every request.

    Args:
        req_pool_indices: [batch] row of each request in `req_to_token`.
        req_to_token: [requests, context] KV slot of each position.
        start_offset: [batch] first position.
        end_offset: [batch] one past the last position; `start_offset + draft_token_num`, as every caller has it.
        batch_size: number of requests.
        draft_token_num: number of positions of a request.
        device: where the result goes.

    Returns:
        [batch * draft_token_num] int64 slots, a request's after another's.

    Raises:
        ValueError: the requests' runs do not all have `draft_token_num` positions.
    """
    if not torch.equal(end_offset.long(), start_offset.long() + draft_token_num):
        raise ValueError(
            f"end_offset {end_offset.tolist()} is not start_offset {start_offset.tolist()} + {draft_token_num}"
        )
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num, device=start_offset.device)
    rows = req_to_token[req_pool_indices.long()]
    return rows.gather(1, columns).reshape(batch_size * draft_token_num).to(device=device, dtype=torch.int64)
