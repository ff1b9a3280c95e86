"""Expanding sweep blocks to coordinates: products of lists, with include and exclude, equal points merged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ddtree_bench.config.models import Config, Point, SweepBlock

METHODS_WITH_DRAFTER = ("DFLASH", "DDTREE")
AXES = (
    *("target", "model", "method", "budget", "topk_cap", "block_size"),
    *("tensor_parallel", "expert_parallel", "workload", "concurrency", "rate"),
)
"""The axes of a sweep block, the last one running fastest."""

OPEN_LOOP_MOST = 256
"""Most requests in flight of an open loop that does not say: what the client is calibrated for."""


@dataclass(frozen=True)
class Coordinates:
    """One point of a sweep, by the configuration's own names; what a method or a load does not know is None.

    `topk_cap` is the effective cap, min(topk_cap, budget). `block` is the index of the sweep block it came from.
    """

    block: int
    target: str
    engine: str
    model: str
    method: str
    budget: int | None
    topk_cap: int | None
    block_size: int | None
    tensor_parallel: int
    expert_parallel: int
    max_running_requests: int
    flags: tuple[tuple[str, str], ...]
    workload: str
    concurrency: int
    rate: float | None = None
    arrivals: str | None = None

    @property
    def server(self) -> tuple[object, ...]:
        """What makes the server: points that agree in it are measured on one."""
        place = (self.target, self.engine, self.model, self.method, self.budget, self.topk_cap, self.block_size)
        return (*place, self.tensor_parallel, self.expert_parallel, self.max_running_requests, self.flags)


def expand(config: Config) -> list[Coordinates]:
    """Return the points of all blocks in the order they are written, each once.

    The names in the blocks must exist (`checks.check_references`).
    """
    unique: dict[Coordinates, Coordinates] = {}
    for index, block in enumerate(config.sweep):
        for point in _points(config, index, block):
            unique.setdefault(replace(point, block=-1), point)
    return list(unique.values())


def _points(config: Config, index: int, block: SweepBlock) -> Iterator[Coordinates]:
    axes = (
        block.target,
        block.model,
        block.method,
        block.budget or [None],
        block.topk_cap,
        block.block_size or [None],
        block.tensor_parallel,
        block.expert_parallel,
        block.workload,
        block.concurrency or [None],
        block.rate or [None],
    )
    for values in itertools.product(*axes):
        point = _resolve(config, index, block, Point(**dict(zip(AXES, values, strict=True))))
        if not any(_matches(point, pattern) for pattern in block.exclude):
            yield point
    first = Point(**{name: axis[0] for name, axis in zip(AXES, axes, strict=True)})
    for addition in block.include:
        yield _resolve(config, index, block, _included(first, addition))


def _included(first: Point, addition: Point) -> Point:
    """A point of `include`: the block's first values fill what it does not say.

    A rate of its own comes with a bound of its own: the concurrency of the block's closed loops is none.
    """
    given = addition.model_dump(exclude_none=True)
    bound = {"concurrency": None} if addition.rate is not None else {}
    return first.model_copy(update=bound | given)


def _resolve(config: Config, index: int, block: SweepBlock, point: Point) -> Coordinates:
    target = config.targets[point.target or ""]
    model = config.models[point.model or ""]
    drafted = point.method in METHODS_WITH_DRAFTER
    trained = model.drafter.block_size if model.drafter else None
    budget = point.budget if point.method == "DDTREE" else None
    return Coordinates(
        block=index,
        target=point.target or "",
        engine=point.engine or block.engine or target.engine,
        model=point.model or "",
        method=point.method or "",
        budget=budget,
        topk_cap=_effective_cap(point.topk_cap, budget),
        block_size=(point.block_size or trained) if drafted else None,
        tensor_parallel=point.tensor_parallel or 1,
        expert_parallel=point.expert_parallel or 1,
        max_running_requests=point.max_running_requests or block.max_running_requests,
        flags=tuple(sorted({**target.flags, **block.flags}.items())),
        workload=point.workload or "",
        concurrency=point.concurrency or (1 if point.rate is None else OPEN_LOOP_MOST),
        rate=point.rate,
        arrivals=None if point.rate is None else block.arrivals,
    )


def _effective_cap(cap: int | str | None, budget: int | None) -> int | None:
    if budget is None:
        return None
    return min(cap, budget) if isinstance(cap, int) else budget


def _matches(point: Coordinates, pattern: Point) -> bool:
    wanted = pattern.model_dump(exclude_none=True)
    if wanted.get("topk_cap") == "budget":
        wanted["topk_cap"] = point.budget
    return bool(wanted) and all(getattr(point, key) == value for key, value in wanted.items())
