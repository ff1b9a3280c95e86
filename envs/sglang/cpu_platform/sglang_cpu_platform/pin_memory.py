"""`Tensor.pin_memory` on a machine without an accelerator: the tensor itself.

`managers/schedule_batch.py:3830` pins the masks of a hybrid model's state tracking without asking the platform. Pinning
only speeds up copies to an accelerator, and torch raises where there is none.
"""

from __future__ import annotations

from typing import Any

import torch

_pinned = torch.Tensor.pin_memory


def _pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _pinned(self, *args, **kwargs) if torch.accelerator.is_available() else self


def skip_without_accelerator() -> None:
    """Make `Tensor.pin_memory` return its tensor where there is no accelerator. Safe to repeat."""
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign,assignment]
