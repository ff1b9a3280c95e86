"""Results folders with views and store entries as a run leaves them, filled with simulated requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddtree_bench import tables
from ddtree_bench.plan import Cell, Load, ModelRef, Run, Server, WarmUp, Workload
from ddtree_bench.records.store import REQUESTS, Store
from ddtree_bench.records.views import write_run_views
from ddtree_bench.targets.probe import host_key

PREFILL_S = 0.080
STEP_S = 0.031
BLOCK = 8
AR = Server(
    name="ar",
    target="local",
    engine="reference",
    environment="3f9c2ab4d1e0",
    model=ModelRef("SmolLM2-135M-Instruct", "12fd25f"),
    drafter=None,
    method="AR",
    max_running_requests=8,
)
DFLASH = replace(AR, name="dflash", method="DFLASH", drafter=ModelRef("smollm2-dflash", "1"), block_size=BLOCK)


def tree(budget: int, cap: int = 8) -> Server:
    """A DDTREE server with the effective cap min(cap, budget)."""
    return replace(
        DFLASH, name=f"ddtree-b{budget}-k{min(cap, budget)}", method="DDTREE", budget=budget, topk_cap=min(cap, budget)
    )


HOST: dict[str, Any] = {
    "schema": 1,
    "hostname": "bench-1",
    "kernel": "6.1.0",
    "cpu": {"model": "Xeon 8480", "cores": 2},
    "gpus": [],
    "driver": None,
    "models": {
        "SmolLM2-135M-Instruct": {"fingerprint": "a" * 64, "path": "/models/smollm2"},
        "smollm2-dflash": {"fingerprint": "b" * 64, "path": "/models/drafter"},
    },
}

SERVER_INFO: dict[str, Any] = {"version": "0.1.0", "numerics": "mixed", "bit_exact": True, "threads": 2}

DEMO = (AR, DFLASH, tree(4), tree(8), tree(16))


@dataclass(frozen=True)
class Simulation:
    """What to make.

    By (server name, repeat): `failing` is the reason of a failed cell, `failing_requests` the requests that time out.
    By server name: `blocks` overrides the block, `server_info` and `spec` fields of what the server says of itself and
    of a request, `overcount` scales its counter of tokens, `cached` is the prefix cache's part of each prompt.
    `texts` replaces the answer to (server name, index). Without `usage` the servers do not count their tokens.
    `records` are further fields of the record by (server name, repeat).
    """

    servers: Sequence[Server] = DEMO
    repeats: int = 3
    concurrencies: Sequence[int] = (1,)
    workloads: Sequence[str] = ("chat",)
    n_prompts: int = 12
    max_tokens: int = 48
    run_sd: float = 0.02
    seed: int = 7
    failing: Mapping[tuple[str, int], str] = field(default_factory=dict)
    failing_requests: Mapping[tuple[str, int], Sequence[int]] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    server_info: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    spec: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    overcount: Mapping[str, float] = field(default_factory=dict)
    cached: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[tuple[str, int], str] = field(default_factory=dict)
    repeat_prompts: bool = False
    usage: bool = True
    records: Mapping[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """A results folder: its views of cells and its store."""

    views: list[Path]
    store: Path


def make_results(folder: Path, simulation: Simulation = Simulation()) -> Made:
    """Write views and store entries below `folder` through the project's own store; one seed gives the same data."""
    store = Store(folder / "store")
    views = []
    for repeat in range(1, simulation.repeats + 1):
        for server in simulation.servers:
            run = Run(server, repeat, tuple(_cells(server, simulation, repeat)))
            factor = float(
                np.exp(np.random.default_rng([simulation.seed, repeat, _number(server)]).normal(0, simulation.run_sd))
            )
            attempts = {cell: _add(store, cell, simulation, factor) for cell in run.cells}
            write_run_views(run, attempts, store, folder)
            views += [folder / cell.view for cell in run.cells]
    return Made(views, store.root)


def _cells(server: Server, simulation: Simulation, repeat: int) -> list[Cell]:
    warmup = WarmUp(prompts="config/prompts/warmup.jsonl", prompts_sha256="0" * 64, max_tokens=16)
    works = [
        Workload(
            name,
            f"{name}.jsonl",
            None,
            simulation.n_prompts,
            f"{i}" * 64,
            simulation.max_tokens,
            0.0,
            1.0,
            -1,
            0,
            False,
            simulation.repeat_prompts,
            "chat",
        )
        for i, name in enumerate(simulation.workloads)
    ]
    return [Cell(server, work, Load(c), warmup, repeat) for work in works for c in simulation.concurrencies]


def _number(server: Server) -> int:
    return {"AR": 0, "DFLASH": 1}.get(server.method, 2 + (server.budget or 0) * 100 + (server.topk_cap or 0))


def _add(store: Store, cell: Cell, simulation: Simulation, factor: float) -> Any:
    server, repeat = cell.server, cell.repeat
    reason = simulation.failing.get((server.name, repeat))
    stamp = f"2026-05-0{min(repeat, 9)}T10:{_number(server) % 60:02d}:00.000+00:00"
    frame = None if reason else simulate_requests(cell, factor, simulation)
    record = {
        "schema": 1,
        "plan_key": cell.key,
        "host_key": host_key(HOST, server.model.name, server.drafter.name if server.drafter else None),
        "status": "failed" if reason else "ok",
        "reason": reason,
        "log_tail": f"loading {server.model.name}\nFATAL: {reason}" if reason else None,
        "identity": cell.identity,
        "labels": cell.labels,
        "start_id": f"{_number(server):04x}{repeat:08x}",
        "block": simulation.blocks.get(server.name, "pass-1") + f"-r{repeat}",
        "started_at": stamp,
        "ended_at": stamp.replace(":00.000", ":40.000"),
        "ready_s": 3.2,
        "warmup": {},
        "host": HOST,
        "environment": {},
        "server_info": {"version": "0.1.0", "numerics": "mixed", "bit_exact": True, "threads": 2}
        | dict(simulation.server_info.get(server.name, {})),
        "counters": {}
        if frame is None or not simulation.usage
        else counters(frame, simulation.overcount.get(server.name, 1.0)),
        "client": {},
    }
    record |= simulation.records.get((server.name, repeat), {})
    # JSON has no tuples; a record that is read back is what its digest is taken of.
    record = json.loads(json.dumps(record))

    def write(folder: Path) -> None:
        (folder / "server.log").write_text("log\n")
        if frame is not None:
            frame.to_parquet(folder / REQUESTS)

    return store.add(record, write)


def counters(frame: pd.DataFrame, overcount: float) -> dict[str, dict[str, int]]:
    """The server's counters before and after the cell: they begin with what the warm-up left."""
    rounds = sum(json.loads(spec)["spec_verify_ct"] for spec in frame["spec"])
    tokens = round(overcount * int(frame["completion_tokens"].sum()))
    before = {"generation_tokens_total": 68, "verify_calls_total": 42}
    return {"before": before, "after": {"generation_tokens_total": 68 + tokens, "verify_calls_total": 42 + rounds}}


def hit_rate(server: Server) -> float:
    """Chance that the next draft of a round is right: larger budgets cover more of the target's choices."""
    return 0.58 if server.method == "DFLASH" else 0.56 + 0.055 * float(np.log2(server.budget or 1))


def round_seconds(server: Server, concurrency: int) -> float:
    """Time of a round: the draft, and a verify that grows with its width and the requests in flight."""
    rows = server.verify_width * concurrency
    return STEP_S * (1 + 0.012 * (rows - 1)) + (0.006 if server.drafter else 0.0)


def simulate_requests(cell: Cell, factor: float, simulation: Simulation) -> pd.DataFrame:
    """Raw stamps of a cell in the layout of requests.parquet: greedy, so accepted drafts repeat between runs."""
    concurrency = cell.load.concurrency
    free = np.zeros(concurrency)
    clock = np.random.default_rng([simulation.seed, cell.repeat, _number(cell.server), concurrency])
    timed_out = simulation.failing_requests.get((cell.server.name, cell.repeat), ())
    rows = []
    for index in range(cell.workload.n_prompts):
        worker = int(np.argmin(free))
        row = _request(cell, index, worker, 1000.0 + free[worker], factor, simulation, clock)
        if index in timed_out:
            row |= {"status": "timeout", "error": "no event for 60 s", "finish_reason": None}
        if not simulation.usage:
            row |= {"completion_tokens": None, "event_tokens": [None] * len(row["event_times"])}
        free[worker] = row["t_end"] - 1000.0
        rows.append(row)
    return pd.DataFrame(rows)


def _request(
    cell: Cell,
    index: int,
    worker: int,
    t_send: float,
    factor: float,
    simulation: Simulation,
    clock: np.random.Generator,
) -> dict[str, Any]:
    server, total = cell.server, cell.workload.max_tokens
    draws = np.random.default_rng([simulation.seed, index, _number(server)])
    accepted, committed = [], [1]
    deepest = min(BLOCK - 1, server.budget or BLOCK - 1)
    while committed[-1] < total:
        taken = 0
        while server.drafter and taken < deepest and draws.random() < hit_rate(server) - 0.02 * taken:
            taken += 1
        accepted.append(taken)
        committed.append(min(total, committed[-1] + taken + 1))
    pace = round_seconds(server, cell.load.concurrency) * factor
    gaps = pace * np.exp(clock.normal(0, 0.03, len(accepted)))
    times = t_send + PREFILL_S * factor + np.concatenate([[0.0], np.cumsum(gaps)])
    n = len(times)
    histogram = np.bincount(accepted).tolist()
    spec = {
        "spec_verify_ct": len(accepted) if server.drafter else 0,
        "spec_accept_length": total / len(accepted) if server.drafter else None,
        "spec_num_correct_drafts": sum(accepted),
        "spec_num_proposed_drafts": len(accepted) * (server.verify_width - 1),
        "spec_correct_drafts_histogram": histogram if server.drafter else None,
    }
    if server.budget:
        spec |= {
            "spec_tree_nodes": len(accepted) * server.budget,
            "spec_tree_branching_nodes": len(accepted) * (server.budget // 2),
            "spec_tree_max_depth": deepest,
        }
    spec |= simulation.spec.get(server.name, {})
    text = simulation.texts.get((server.name, index), "x " * total)
    return {
        "index": index,
        "prompt_id": f"p{index:02d}",
        "category": ("code", "maths", "prose")[index % 3],
        "prompt_sha256": f"{index:064x}",
        "worker": worker,
        "max_tokens": total,
        "intended_start": None,
        "t_send": t_send,
        "t_sent": t_send + 2e-5,
        "t_end": float(times[-1]) + 0.0006,
        "connect_s": None,
        "retries": 0,
        "event_times": [*times.tolist(), float(times[-1]) + 0.0002, float(times[-1]) + 0.0004],
        "event_lags": [2e-5] * (n + 2),
        "event_kinds": ["token"] * n + ["usage", "done"],
        "event_texts": ["x "] * n + ["", ""],
        "event_tokens": [*committed, total, None],
        "event_tokenized": None,
        "event_finish": [False] * (n - 1) + [True, False, False],
        "http_status": 200,
        "status": "ok",
        "error": None,
        "finish_reason": "length",
        "prompt_tokens": 40,
        "completion_tokens": total,
        "cached_prompt_tokens": simulation.cached.get(server.name, 0),
        "spec": json.dumps(spec),
        "text": text,
    }


SMALL = Simulation(n_prompts=4, max_tokens=24)
"""Results that are quick to make."""


def build(folder: Path, simulation: Simulation, **more: object) -> dict[str, pd.DataFrame]:
    """Make results and return their tables; `more` goes to build_tables."""
    made = make_results(folder, simulation)
    return tables.build_tables(made.views, made.store, **more)  # type: ignore[arg-type]


def one(frame: pd.DataFrame, **wanted: object) -> pd.Series:
    """Return the one row in which the named columns have the wanted values."""
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]
