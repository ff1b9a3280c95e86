"""`Tensor.record_stream` made to do nothing for tensors on the CPU.

`speculative/dflash_worker_v2.py:2481` calls it with the device module's current stream. Torch has no implementation
for the CPU and raises, though there is nothing to record: a CPU has one stream and no caching allocator.
"""

from __future__ import annotations

from typing import Any

import torch

_recorded = torch.Tensor.record_stream


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    if self.device.type != "cpu":
        _recorded(self, stream)


def ignore_cpu_tensors() -> None:
    """Make `Tensor.record_stream` return at once for CPU tensors; other devices keep torch's own."""
    torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign,assignment]
