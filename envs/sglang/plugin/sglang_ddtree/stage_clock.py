"""Times of a round's stages: of the device where there is one, without ever waiting for it; else of the wall."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class StageClock:
    """Runs from when it is made; the end of a stage is the start of the next. This one is for when nobody asks."""

    def mark(self, stage: str) -> None:
        """The stage ends here: its work is done, or queued on the device."""

    def split(self, stage: str, tail: str, nanoseconds: Tensor) -> None:
        """Say that the end of the marked `stage`, int64 `nanoseconds` [1] on the device, was another one, `tail`."""

    def copy_to_host(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Queue what the device has measured to be copied by `copy`, which takes a tensor to the host."""

    def seconds(self) -> dict[str, float]:
        """The time of each stage; the device must have done the last stage and the copies."""
        return {}


NO_CLOCK = StageClock()


class WallClock(StageClock):
    """For the CPU, where a stage's work is done when its calls return."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """The stage ends here."""
        now = time.perf_counter()
        self._seconds[stage] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """The time of each marked stage."""
        return self._seconds


class DeviceClock(StageClock):
    """Events in the order of the device's work, on the stream that is current at each mark.

    `device_module` is torch.cuda or its like.
    """

    def __init__(self, device_module: Any) -> None:
        self._new_event = device_module.Event
        self._events: list[tuple[str, Any]] = []
        self._splits: list[tuple[str, str, Tensor]] = []
        self.mark("start")

    def mark(self, stage: str) -> None:
        """The stage's work, as queued so far, ends here."""
        event = self._new_event(enable_timing=True)
        event.record()
        self._events.append((stage, event))

    def split(self, stage: str, tail: str, nanoseconds: Tensor) -> None:
        """As of StageClock."""
        self._splits.append((stage, tail, nanoseconds))

    def copy_to_host(self, copy: Callable[[Tensor], Tensor]) -> None:
        """As of StageClock."""
        self._splits = [(stage, tail, copy(nanoseconds)) for stage, tail, nanoseconds in self._splits]

    def seconds(self) -> dict[str, float]:
        """As of StageClock."""
        ends = zip(self._events, self._events[1:], strict=False)
        found = {stage: before.elapsed_time(event) / 1e3 for (_, before), (stage, event) in ends}
        for stage, tail, nanoseconds in self._splits:
            found[tail] = min(int(nanoseconds) / 1e9, found[stage])
            found[stage] -= found[tail]
        return found


def new_clock(device: torch.device | str) -> StageClock:
    """A running clock for work on `device`."""
    if torch.device(device).type == "cpu":
        return WallClock()
    return DeviceClock(torch.get_device_module(device))
