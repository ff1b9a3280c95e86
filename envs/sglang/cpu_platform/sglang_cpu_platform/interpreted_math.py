"""Triton functions that SGLang's kernels know by a name of their own.

`kernels/ops/attention/fla/op.py:20` binds `exp = tl.exp` and the like at import, and its kernels import those names.
The interpreter replaces the functions of the module `tl` while a kernel runs, which such a copy does not see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import triton.language as tl

NAMES = ("exp", "exp2", "log", "log2")


def look_up_late() -> None:
    """Let the copies in all modules of SGLang call what `tl` holds at the time. Safe to repeat."""
    from sglang.kernels.ops.attention.fla import op

    for name in NAMES:
        copy = getattr(op, name)
        if copy is not getattr(tl, name):
            continue
        for module in [m for key, m in sys.modules.items() if key.startswith("sglang.")]:
            if vars(module).get(name) is copy:
                setattr(module, name, _late(name))


def _late(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(tl, name)(*args, **kwargs)

    return call
