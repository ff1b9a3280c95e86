"""`--enable-deterministic-inference` without its kernels, so that requests with a seed can be tested.

`model_executor/model_runner.py:842` replaces torch's matrix products, means and norms by batch-invariant CUDA kernels
and looks for an accelerator to register them for, which a CPU is not. What else the option does stays: above all,
draws by `sampling_seed` and position. Torch's own products on a CPU may differ in their last bits between batches of
different size.
"""

from __future__ import annotations


def keep_torch_kernels() -> None:
    """Make `enable_batch_invariant_mode`, which every model runner imports when it needs it, do nothing."""
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = _do_nothing


def _do_nothing() -> None:
    pass
