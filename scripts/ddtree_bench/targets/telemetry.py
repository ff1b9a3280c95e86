"""Watch this machine: a program that prints what its GPUs and CPUs do, once a second, until its input ends.

    python -m ddtree_bench.targets.telemetry

It prints JSON lines. The first says what is asked about GPUs and how often:

    {"source": "nvidia-ml-py", "every_s": 1.0}

Each other line is a sample: the moment by CLOCK_MONOTONIC and since 1970, the values of each device, and in `missing`
the reasons for values that were not had from here on, each said once:

    {"monotonic": S, "time": S, "took_s": S, "devices": {"cpu": {…}, "gpu0": {…}}, "missing": {"gpu0.energy_j": WORDS}}

The first sample is taken at once, the last when the input ends. The moments are multiples of a second from the first:
they do not drift, and one that a slow answer has passed is left out. Standard library only, but for nvidia-ml-py, which
is used where it is there.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from ddtree_bench.targets.cpu_samples import Cpus
from ddtree_bench.targets.gpu_samples import Gpus, watched_gpus
from ddtree_bench.targets.nvidia import Answer, Unavailable

EVERY_S = 1.0


class Watch:
    """Samples of this machine, and the reasons for what is not in them."""

    def __init__(self, gpus: Gpus | None, no_gpus: str | None, cpus: Cpus) -> None:
        self._gpus = gpus
        self._cpus = cpus
        self._reasons = {} if no_gpus is None else {"gpus": no_gpus}
        self._said: dict[str, str] = {}

    def sample(self) -> dict[str, Any]:
        """Return a sample as it is printed; its moment is in the middle of the time that it took."""
        began = time.monotonic()
        answers = {"cpu": self._cpus.sample(), **self._gpu_answers()}
        took = time.monotonic() - began
        return {
            "monotonic": began + took / 2,
            "time": time.time() - took / 2,
            "took_s": took,
            "devices": {device: answer.values for device, answer in answers.items()},
            "missing": self._news(answers),
        }

    def _gpu_answers(self) -> dict[str, Answer]:
        try:
            answers = self._gpus.sample() if self._gpus else []
        except Unavailable as error:
            self._reasons["gpus"] = str(error)
            return {}
        return {f"gpu{index}": answer for index, answer in enumerate(answers)}

    def _news(self, answers: dict[str, Answer]) -> dict[str, str]:
        """The reasons that were not said before."""
        for device, answer in answers.items():
            self._reasons |= {f"{device}.{name}": why for name, why in answer.missing.items()}
        news = {name: why for name, why in self._reasons.items() if self._said.get(name) != why}
        self._said |= news
        return news


def watch(wait: Callable[[float], bool], write: Callable[[dict[str, Any]], None]) -> None:
    """Write the first line and the samples. `wait` waits for up to so many seconds; True when the input has ended."""
    with ExitStack() as open_gpus:
        gpus, no_gpus = None, None
        try:
            gpus = open_gpus.enter_context(watched_gpus())
        except Unavailable as error:
            no_gpus = str(error)
        write({"source": gpus.source if gpus else None, "every_s": EVERY_S})
        watched = Watch(gpus, no_gpus, Cpus())
        first, ended = time.monotonic(), False
        while True:
            write(watched.sample())
            if ended:
                return
            past = time.monotonic() - first
            ended = wait((past // EVERY_S + 1) * EVERY_S - past)


def input_ended(seconds: float) -> bool:
    """Wait for up to so many seconds; True as soon as the input has ended."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([sys.stdin], [], [], left)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return True
    return False


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    # Whoever has started it may be gone.
    with suppress(BrokenPipeError):
        watch(input_ended, _print)
