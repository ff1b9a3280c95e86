"""The all-gather of tensor parallelism, on CPU tensors.

`distributed/parallel_state.py:1363` (`GroupCoordinator.all_gather_into_tensor`) goes through a torch operator, which
`utils/common.py:3001` registers for `PrivateUse1` alone on an out-of-tree platform: CPU tensors find no kernel. The
method that the operator calls works on them.
"""

from __future__ import annotations


def gather_without_operator() -> None:
    """Let all groups call the method behind the operator, as the release's own CPU device does."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
