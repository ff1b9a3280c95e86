"""What torch offers for accelerators only: pinned memory and the device context."""

from __future__ import annotations

import pytest
import torch

from sglang_cpu_platform import device_context, pin_memory


def test_pinning_returns_the_tensor_where_nothing_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    pin_memory.skip_without_accelerator()
    tensor = torch.zeros(2)
    assert tensor.pin_memory() is tensor


def test_pinning_is_still_torchs_own_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(pin_memory, "_pinned", lambda tensor: ("pinned", tensor.shape))
    pin_memory.skip_without_accelerator()
    assert torch.zeros(2).pin_memory() == ("pinned", (2,))


def test_the_cpu_gets_a_device_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "device", None, raising=False)
    device_context.add_for_cpu()
    with torch.get_device_module("cpu").device(None):
        assert torch.zeros(1).device.type == "cpu"
