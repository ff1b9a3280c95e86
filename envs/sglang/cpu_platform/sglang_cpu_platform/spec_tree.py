"""Tree construction and greedy tree verification by SGLang's Triton kernels.

`kernels/ops/speculative/spec_tree.py` (`build_tree_kernel_efficient`, :427; `verify_tree_greedy_func`, :491) has
device-independent Triton kernels, but selects them for XPU only and refuses an out-of-tree platform, for which the
release has no hook. Its own flag, in that module alone, is the narrowest way to select them.
"""

from __future__ import annotations


def use_triton_kernels() -> None:
    """Select the Triton versions of the tree kernels in `spec_tree`."""
    from sglang.kernels.ops.speculative import spec_tree

    spec_tree._is_xpu = True
