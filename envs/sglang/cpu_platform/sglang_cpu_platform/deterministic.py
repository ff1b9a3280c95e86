"""`--enable-deterministic-inference` on a CPU, so that requests with a seed can be tested.

Three places of the release stand in the way. `model_executor/model_runner.py:842` replaces torch's matrix products,
means and norms by batch-invariant CUDA kernels, and looks for an accelerator to register them for; here torch's own
stay, whose last bits may differ between batches of different size. `kernels/ops/sampling/murmur_hash.py:107` hashes
seed and position on a CPU by a kernel of SGLang's CPU package; the Triton kernel of the same file does it here. And
`layers/sampler.py:933` compiles the draw that calls it, but torch cannot trace Triton's interpreter: it runs eagerly.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 1024


def allow_on_cpu() -> None:
    """Keep torch's kernels, hash by Triton, and draw eagerly. Safe to repeat."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.layers import sampler

    batch_invariant_ops.enable_batch_invariant_mode = _keep_torch_kernels
    sampler.murmur_hash32 = murmur_hash32
    sampler.multinomial_with_seed = inspect.unwrap(sampler.multinomial_with_seed)


def _keep_torch_kernels() -> None:
    pass


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """The uint32 hashes [rows, columns] of seeds [rows], positions [rows] and columns [columns]."""
    import torch
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel

    rows, columns = len(seed), len(col_indices)
    hashed = torch.empty(rows, columns, dtype=torch.uint32)
    grid = (rows, -(-columns // BLOCK_SIZE))
    murmur_hash32_kernel[grid](seed, positions, col_indices, hashed, rows, columns, BLOCK_SIZE=BLOCK_SIZE)
    return hashed
