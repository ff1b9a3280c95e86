"""The time that a part of a captured CUDA graph takes.

An event recorded inside a graph is recorded again by the next replay, which overlap scheduling starts before the last
one's result is read. So the graph writes the device's own clock into memory, and each replay's value is copied out.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from sglang_ddtree.candidates import Candidates


@triton.jit
def write_time(out, place):  # type: ignore[no-untyped-def]
    """Write the device's time, in nanoseconds, to out[place]; int64. NVIDIA's clock ticks about every microsecond."""
    tl.store(out + place, globaltimer())


class TimedSampler:
    """Times another sampler at the end of a captured forward; what it writes lies between two times on the device."""

    def __init__(self, sampler: Any, device: torch.device | str):
        self._sampler = sampler
        self._times = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> None:
        """Run inside the capture, as the sampler would."""
        write_time[(1,)](self._times, 0)
        self._sampler(hidden, input_ids)
        write_time[(1,)](self._times, 1)

    def read(self, batch: int) -> Candidates:
        """The sampler's result of the replay that has just run."""
        return self._sampler.read(batch)

    def nanoseconds(self) -> Tensor:
        """How long the sampler took in the replay that has just run, [1] int64, no part of the graph's memory."""
        return self._times[1:] - self._times[:1]
