"""Service level objectives, and the requests that meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ddtree_bench.metrics.answers import Answer
from ddtree_bench.metrics.throughput import wall_s


@dataclass(frozen=True)
class Slos:
    """The most that a request may take, s (`tpot_s`: s/token); None where there is no objective.

    Raises ValueError for one that is not above 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name}: {value}; an objective must be above 0 s, or left out")

    @property
    def any_given(self) -> bool:
        """Whether there is an objective at all."""
        return any(getattr(self, field.name) is not None for field in fields(self))


def meets(given: Answer, slos: Slos) -> bool:
    """Return whether an ok request meets every objective.

    In an open loop TTFT and E2E count from the scheduled start, so that a request that had to wait in the client is
    late. With all tokens in one event there is no TPOT and its objective is not applied; with N unknown it is not met.
    """
    ttft = given.ttft_s if given.ttft_from_intended_s is None else given.ttft_from_intended_s
    e2e = given.e2e_s if given.e2e_from_intended_s is None else given.e2e_from_intended_s
    return _within(ttft, slos.ttft_s) and _within(e2e, slos.e2e_s) and _meets_tpot(given, slos.tpot_s)


def _within(value: float, most: float | None) -> bool:
    return most is None or value <= most


def _meets_tpot(given: Answer, most: float | None) -> bool:
    if most is None:
        return True
    if given.tokens.total is None:
        return False
    return given.tpot_s is None or given.tpot_s <= most


def goodput(answers: Sequence[Answer], sent: int, slos: Slos | None) -> dict[str, float | int | None]:
    """Return how many ok requests meet every objective, and how many that is a second of wall time.

    None without an objective, and for the rate when no time passed; with `sent` requests and none ok it is 0.
    """
    if slos is None or not slos.any_given or not sent:
        return {"slo_met": None, "goodput_req_s": None}
    met = sum(meets(given, slos) for given in answers)
    wall = wall_s(answers)
    rate = 0.0 if wall is None else met / wall if wall else None
    return {"slo_met": met, "goodput_req_s": rate}
