"""The commit of recurrent state in torch: the accepted step's snapshot goes to the request's slot, -1 to none."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

import torch

from sglang_cpu_platform import recurrent_state, torchvision_window


def test_accepted_steps_are_copied_and_skipped_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_window.install()
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as kernels
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend

    for module in (kernels, backend):  # put back after the test
        for name in ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"):
            monkeypatch.setattr(module, name, getattr(module, name))
    recurrent_state.commit_in_torch()
    snapshots = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)  # layers, requests, steps, state
    states = torch.zeros(2, 8, 5)
    kernels.fused_mamba_state_scatter_with_mask(states, snapshots, torch.tensor([6, 1, 3]), torch.tensor([2, -1, 0]))
    assert torch.equal(states[:, 6], snapshots[:, 0, 2])
    assert torch.equal(states[:, 3], snapshots[:, 2, 0])
    assert states[:, [0, 1, 2, 4, 5, 7]].abs().sum() == 0
