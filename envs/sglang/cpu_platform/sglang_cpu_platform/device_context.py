"""`torch.cpu.device(index)`, a context that does nothing.

SGLang's launchers of Triton kernels wrap them in `torch.get_device_module(device).device(index)`, such as
`srt/utils/common.py:268` and `kernels/ops/attention/fla/utils.py:326`. Torch has that context for accelerators only;
a CPU has one device, so there is nothing to select.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def add_for_cpu() -> None:
    """Give `torch.cpu` the context manager that the device modules of accelerators have. Safe to repeat."""
    torch.cpu.device = _one_device  # type: ignore[attr-defined]


def _one_device(index: int | None) -> AbstractContextManager[None]:  # noqa: ARG001
    return nullcontext()
