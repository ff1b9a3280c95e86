from __future__ import annotations

import pytest
import torch

from sglang_cpu_platform.cache_locs import speculative_cache_locs


def test_slots_are_those_of_each_requests_own_row_from_its_own_offset_on() -> None:
    req_to_token = torch.arange(40, dtype=torch.int32).reshape(4, 10)
    start = torch.tensor([2, 7])
    slots = speculative_cache_locs(
        req_pool_indices=torch.tensor([3, 0]),
        req_to_token=req_to_token,
        start_offset=start,
        end_offset=start + 3,
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert slots.dtype is torch.int64
    assert slots.tolist() == [32, 33, 34, 7, 8, 9]


def test_runs_of_unequal_length_are_an_error_and_not_cut() -> None:
    with pytest.raises(ValueError, match=r"end_offset \[3, 5\] is not start_offset \[1, 1\] \+ 2"):
        speculative_cache_locs(
            req_pool_indices=torch.tensor([0, 1]),
            req_to_token=torch.zeros(2, 8, dtype=torch.int32),
            start_offset=torch.tensor([1, 1]),
            end_offset=torch.tensor([3, 5]),
            batch_size=2,
            draft_token_num=2,
            device="cpu",
        )
