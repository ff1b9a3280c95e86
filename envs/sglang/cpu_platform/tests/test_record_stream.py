from __future__ import annotations

import pytest
import torch

from sglang_cpu_platform import record_stream


def test_cpu_tensors_are_ignored_and_other_devices_still_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.Tensor, "record_stream", torch.Tensor.record_stream)
    monkeypatch.setattr(record_stream, "_recorded", lambda tensor, stream: calls.append((tensor.device.type, stream)))
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        torch.zeros(1).record_stream(torch.cpu.current_stream())
    record_stream.ignore_cpu_tensors()
    torch.zeros(1).record_stream(torch.cpu.current_stream())
    torch.zeros(1, device="meta").record_stream("stream")
    assert calls == [("meta", "stream")]
