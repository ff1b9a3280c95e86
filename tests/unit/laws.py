"""Property tests on machines whose speed is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings


def law(*examples: Any, most: int = 100, **named: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`given` without limits of time: a busy neighbour makes no law untrue."""
    unhurried = settings(max_examples=most, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: unhurried(given(*examples, **named)(test))
