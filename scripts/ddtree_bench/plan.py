"""What is to be measured: servers, workloads, loads, cells and runs, and the plan keys of the cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from ddtree_bench import keys
from ddtree_bench.config.load import ConfigError
from ddtree_bench.config.models import Config
from ddtree_bench.config.sweep import Coordinates
from ddtree_bench.load.cell_prompts import cell_prompts
from ddtree_bench.load.prompts import prompt_set_sha256
from ddtree_bench.load.prompts import read as read_prompts

Method = Literal["AR", "DFLASH", "DDTREE"]

EXTERNAL = "external"
"""Stands for the environment's key of a server that the workflow neither builds nor starts."""


@dataclass(frozen=True)
class ModelRef:
    """A model by name and revision; where its files lie differs by target and is no part of it."""

    name: str
    revision: str


@dataclass(frozen=True)
class Server:
    """One launch configuration: target x engine x model pair x method x parallelism x flags.

    `environment` is the environment's key, `EXTERNAL` for an endpoint that is up already; `budget` counts tree nodes
    without the root; `topk_cap` is the effective cap, min(topk_cap, budget). `block_size` is the drafter's block, the
    anchor included. `client` is where the load of a server on a host over SSH comes from: the way is in every latency.
    `name` is the label in paths, tables and figures; it is unique in a plan and no part of the identity.
    """

    name: str
    target: str
    engine: str
    environment: str
    model: ModelRef
    drafter: ModelRef | None
    method: Method
    budget: int | None = None
    topk_cap: int | None = None
    block_size: int | None = None
    tensor_parallel: int = 1
    expert_parallel: int = 1
    max_running_requests: int = 1
    flags: tuple[tuple[str, str], ...] = ()
    client: Literal["here", "target"] | None = None

    @property
    def verify_width(self) -> int:
        """Rows of one target forward a request: 1 for AR, the block for DFLASH, budget + 1 for DDTREE."""
        if self.method == "DDTREE":
            assert self.budget is not None
            return self.budget + 1
        if self.method == "DFLASH":
            assert self.block_size is not None
            return self.block_size
        return 1

    @property
    def external(self) -> bool:
        """Whether the server is up already: nothing of it is built, started or stopped."""
        return self.environment == EXTERNAL

    @property
    def identity(self) -> dict[str, Any]:
        """The part of a plan key that says which server."""
        fields = {**asdict(self), "flags": dict(self.flags)}
        del fields["name"]
        if self.client is None:
            # As it was before there was a way between client and server: what has been measured keeps its key.
            del fields["client"]
        return fields

    @cached_property
    def key(self) -> str:
        """Digest of the server's identity, 64 hex digits."""
        return keys.digest(self.identity)


@dataclass(frozen=True)
class Workload:
    """A prompt set, the sampling and the length rule. `prompts_sha256` covers the n_prompts used, in order."""

    name: str
    prompts: str
    blocks: tuple[int, ...] | None
    n_prompts: int
    prompts_sha256: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    repeat_prompts: bool
    endpoint: Literal["chat", "completions"]

    @property
    def identity(self) -> dict[str, Any]:
        """The part of a plan key that says which work; names and paths are no part of it."""
        fields = asdict(self)
        return {k: v for k, v in fields.items() if k not in ("name", "prompts", "blocks")}


@dataclass(frozen=True)
class Load:
    """A load point.

    Closed loop: `concurrency` users, each of which sends its next request when it has the answer to its last. Open
    loop: `rate` requests/s arrive whether or not earlier ones are answered, at Poisson or constant intervals; at most
    `concurrency` are in flight, and those that have to wait for that are late by their own latencies.
    """

    concurrency: int
    kind: Literal["closed", "open"] = "closed"
    rate: float | None = None
    arrivals: Literal["poisson", "constant"] | None = None

    @property
    def name(self) -> str:
        """The load's part of a view's file name."""
        if self.rate is None:
            return f"c{self.concurrency}"
        # The exact number: two rates must never share a file.
        rate = repr(self.rate).removesuffix(".0")
        return f"q{rate}{'k' if self.arrivals == 'constant' else ''}-c{self.concurrency}"


@dataclass(frozen=True)
class WarmUp:
    """What a server answers before it is measured, once for each concurrency and class of prompt lengths."""

    prompts: str
    prompts_sha256: str
    max_tokens: int

    @property
    def identity(self) -> dict[str, Any]:
        """The part of a plan key that says how the server was warmed up."""
        fields = asdict(self)
        del fields["prompts"]
        return fields


@dataclass(frozen=True)
class Cell:
    """The smallest thing that is cached: server x workload x load x repeat."""

    server: Server
    workload: Workload
    load: Load
    warmup: WarmUp
    repeat: int

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that is known before anything runs and that the measured numbers may depend on."""
        return {
            "protocol": keys.PROTOCOL,
            "server": self.server.identity,
            "workload": self.workload.identity,
            "load": self._load_identity,
            "warmup": self.warmup.identity,
            "repeat": self.repeat,
        }

    @cached_property
    def key(self) -> str:
        """The plan key, 64 hex digits."""
        return keys.digest(self.identity)

    @property
    def _load_identity(self) -> dict[str, Any]:
        drawn = {"arrival_seed": self.arrival_seed} if self.load.kind == "open" else {}
        return asdict(self.load) | drawn

    @property
    def arrival_seed(self) -> int:
        """Seed of the arrivals of an open loop: the same for every server, another one for each repeat."""
        return self.workload.seed + self.repeat

    @property
    def labels(self) -> dict[str, Any]:
        """What people call this cell; no part of its identity."""
        return {
            "target": self.server.target,
            "server": self.server.name,
            "workload": self.workload.name,
            "load": self.load.name,
        }

    @property
    def title(self) -> str:
        """The cell in words."""
        return f"{self.server.name}: {self.workload.name} at {self.load.name}"

    @property
    def view(self) -> str:
        """The view's path below the results folder."""
        name = f"{self.workload.name}-{self.load.name}-r{self.repeat}.{keys.short(self.key)}.json"
        return f"cells/{self.server.target}/{self.server.name}/{name}"


@dataclass(frozen=True)
class Run:
    """One fresh server start that measures all cells of one server and repeat; `priority` keeps the planned order."""

    server: Server
    repeat: int
    cells: tuple[Cell, ...]
    priority: int = 0

    @property
    def name(self) -> str:
        """The run's name: a rule's, and an item of the log."""
        return f"run-{self.server.target}-{self.server.name}-r{self.repeat}"

    @property
    def identity(self) -> dict[str, Any]:
        """What the run is asked for, by keys alone."""
        return {"server": self.server.key, "repeat": self.repeat, "cells": [cell.key for cell in self.cells]}

    @property
    def warmup_view(self) -> str:
        """Path of the warm-up record below the results folder."""
        digest = keys.short(keys.digest([self.server.key, self.repeat]))
        return f"cells/{self.server.target}/{self.server.name}/warmup-r{self.repeat}.{digest}.json"


@dataclass(frozen=True)
class Plan:
    """All that a configuration asks for; `runs` are in the order in which they are to be measured."""

    cells: tuple[Cell, ...]
    runs: tuple[Run, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that have something to measure."""
        return tuple(dict.fromkeys(run.server.target for run in self.runs))

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers, in the order of the sweep."""
        return tuple(dict.fromkeys(cell.server for cell in self.cells))

    def run(self, identity: Mapping[str, Any]) -> Run:
        """Return the run of an identity. Raises ConfigError when the configuration does not ask for it any more."""
        for run in self.runs:
            if run.identity == identity:
                return run
        raise ConfigError(["the repository was changed since this pass began; start snakemake again"])


def build(
    config: Config, points: Sequence[Coordinates], root: Path, environment_keys: Mapping[tuple[str, str], str]
) -> Plan:
    """Return the plan of validated points; `root` is where prompt paths start, environments go by target and engine.

    Repeats follow each other; inside a repeat the servers stand in an order drawn from the configuration's seed, which
    does not depend on what else is planned.
    """
    servers = _named_servers(config, points, environment_keys)
    warmup = _warmup(config, root)
    workloads: dict[tuple[str, Load], Workload] = {}
    cells: list[Cell] = []
    for repeat in range(1, config.repeats + 1):
        for point in points:
            load = _load(point)
            drawn = (point.workload, load)
            if drawn not in workloads:
                workloads[drawn] = _workload(config, point, root)
            cells.append(Cell(servers[point], workloads[drawn], load, warmup, repeat))
    _require_distinct(cells)
    return Plan(tuple(cells), _ordered_runs(cells, config.seed))


def _require_distinct(cells: Sequence[Cell]) -> None:
    """Raise ConfigError when two names of the configuration stand for one and the same cell."""
    seen: dict[str, Cell] = {}
    problems = []
    for cell in cells:
        first = seen.setdefault(cell.key, cell)
        if first is not cell and cell.repeat == 1:
            problems.append(
                f"sweep: {first.view} and {cell.view} are the same cell under two names; take one of the two models or "
                "workloads out of the sweep"
            )
    if problems:
        raise ConfigError(problems)


def _ordered_runs(cells: Sequence[Cell], seed: int) -> tuple[Run, ...]:
    grouped: dict[tuple[int, Server], list[Cell]] = defaultdict(list)
    for cell in cells:
        grouped[(cell.repeat, cell.server)].append(cell)
    runs = [Run(server, repeat, tuple(members)) for (repeat, server), members in grouped.items()]
    runs.sort(key=lambda run: (run.repeat, keys.digest([seed, run.repeat, run.server.key])))
    return tuple(replace(run, priority=len(runs) - index) for index, run in enumerate(runs))


def _named_servers(
    config: Config, points: Sequence[Coordinates], environment_keys: Mapping[tuple[str, str], str]
) -> dict[Coordinates, Server]:
    servers = {point: _server(config, point, _environment(config, point, environment_keys)) for point in points}
    used = Counter(name for _, name in {(server.key, server.name) for server in servers.values()})
    for point, server in servers.items():
        if used[server.name] > 1:
            servers[point] = replace(server, name=f"{server.name}-{server.key[:6]}")
    return servers


def _environment(config: Config, point: Coordinates, environment_keys: Mapping[tuple[str, str], str]) -> str:
    external = config.targets[point.target].launcher == "external"
    return EXTERNAL if external else environment_keys[point.target, point.engine]


def _server(config: Config, point: Coordinates, environment: str) -> Server:
    model = config.models[point.model]
    drafter = model.drafter if point.block_size is not None else None
    return Server(
        name=_server_name(point, drafter.block_size if drafter else None),
        target=point.target,
        engine=point.engine,
        environment=environment,
        model=ModelRef(model.name, model.revision),
        drafter=ModelRef(drafter.name, drafter.revision) if drafter else None,
        method=cast(Method, point.method),
        budget=point.budget,
        topk_cap=point.topk_cap,
        block_size=point.block_size,
        tensor_parallel=point.tensor_parallel,
        expert_parallel=point.expert_parallel,
        max_running_requests=point.max_running_requests,
        flags=point.flags,
        client=config.targets[point.target].client if config.targets[point.target].launcher == "ssh" else None,
    )


def _server_name(point: Coordinates, trained_block: int | None) -> str:
    parts = [point.model, point.method.lower()]
    if point.block_size != trained_block:
        parts.append(f"block{point.block_size}")
    if point.method == "DDTREE":
        parts += [f"b{point.budget}", f"k{point.topk_cap}"]
    if point.tensor_parallel > 1:
        parts.append(f"tp{point.tensor_parallel}")
    if point.expert_parallel > 1:
        parts.append(f"ep{point.expert_parallel}")
    return "-".join(parts)


def _load(point: Coordinates) -> Load:
    if point.rate is None:
        return Load(point.concurrency)
    return Load(point.concurrency, "open", point.rate, cast(Literal["poisson", "constant"], point.arrivals))


def _workload(config: Config, point: Coordinates, root: Path) -> Workload:
    spec = config.workloads[point.workload]
    chosen = cell_prompts(spec, read_prompts(root / spec.prompts), point.concurrency, point.rate)
    return Workload(
        name=point.workload,
        prompts=spec.prompts,
        blocks=tuple(spec.blocks) if spec.blocks else None,
        n_prompts=len(chosen),
        prompts_sha256=prompt_set_sha256(chosen),
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        seed=spec.seed,
        ignore_eos=spec.ignore_eos,
        repeat_prompts=spec.repeat_prompts,
        endpoint=spec.endpoint,
    )


def _warmup(config: Config, root: Path) -> WarmUp:
    spec = config.warmup
    return WarmUp(spec.prompts, prompt_set_sha256(read_prompts(root / spec.prompts)), spec.max_tokens)
