"""Autotuned Triton kernels without timing them.

Triton times the configurations of an autotuned kernel with the benchmarker of the active GPU driver, of which an
interpreting process has none. Configurations differ in speed alone, and under the interpreter not even in that.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.autotuner import Autotuner


def take_first_configuration() -> None:
    """Let every autotuned kernel take the first configuration that its pruning leaves. Safe to repeat."""
    Autotuner._bench = _same_time


def _same_time(self: Autotuner, *args: Any, config: Any, **meta: Any) -> list[float]:  # noqa: ARG001
    return [0.0, 0.0, 0.0]  # the median and two quantiles, as `Autotuner._bench` gives them
