"""Linear layers whose weights lie in memory as the CPU's matrix kernels read them.

oneDNN multiplies a few rows by a bf16 weight about twice as fast when the weight was reordered once, ahead of time,
into its own blocked layout. The operators are those that torch.compile uses for frozen weights; where they are
missing, or in fp32, the plain product is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EXPECTED_ROWS = 16  # the layout hardly depends on it
PIECE = 768  # the longest reduction (K) that bf16 kernels are trusted with


@dataclass(frozen=True)
class Linear:
    """A weight [out, in], cut along `in` into pieces: of at most PIECE columns where rows must not depend on others."""

    pieces: tuple[Tensor, ...]
    widths: tuple[int, ...]
    packed: bool


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed kernels for this type on this CPU."""
    return (
        dtype == torch.bfloat16
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(weight: Tensor, piece: int = PIECE) -> Linear:
    """Lay out `weight` [out, in] for `apply`, in pieces of at most `piece` columns."""
    pieces = [part.contiguous() for part in torch.split(weight, piece, 1)]
    widths = tuple(part.shape[1] for part in pieces)
    packed = can_pack(weight.dtype)
    if packed:
        pieces = [torch.ops.mkldnn._reorder_linear_weight(part, EXPECTED_ROWS) for part in pieces]
    return Linear(tuple(pieces), widths, packed)


def apply(linear: Linear, x: Tensor) -> Tensor:
    """x [T, in] in the weight's type through a weight of one piece: [T, out] in the same type.

    Raises ValueError for a weight of several pieces, whose products `add_to` adds in fp32.
    """
    if len(linear.pieces) > 1:
        raise ValueError(f"a weight in {len(linear.pieces)} pieces, {sum(linear.widths)} columns: use add_to")
    return _product(linear, 0, x)


def add_to(out: Tensor, linear: Linear, x: Tensor) -> None:
    """Add x [T, in] through the weight to fp32 `out` [T, out], piece after piece in a fixed order."""
    if len(linear.pieces) == 1:
        out += _product(linear, 0, x)
        return
    start = 0
    for n, width in enumerate(linear.widths):
        out += _product(linear, n, x[:, start : start + width])
        start += width


def _product(linear: Linear, n: int, x: Tensor) -> Tensor:
    if linear.packed:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, linear.pieces[n], None, "none", [], "")
        return product
    return F.linear(x, linear.pieces[n])
