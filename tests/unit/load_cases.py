"""What the tests of the load client ask with: a workload, prompts, limits, and the row of a single request."""

from __future__ import annotations

import socket
from typing import Any

import pandas as pd
from scripted_server import Script, ScriptedServer

from ddtree_bench.load.cell import Measurement, measure
from ddtree_bench.load.exchange import Limits
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Load, Workload

WORK = Workload(
    name="test",
    prompts="none",
    blocks=None,
    n_prompts=1,
    prompts_sha256="",
    max_tokens=24,
    temperature=0.0,
    top_p=1.0,
    top_k=-1,
    seed=7,
    ignore_eos=False,
    repeat_prompts=False,
    endpoint="chat",
)
SHORT = Limits(connect_s=5.0, connect_retries=0, idle_s=0.3, request_s=60.0)
ONE = Load(1)


def prompts(n: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"p{i}", 1, "code", f"prompt {i}") for i in range(n))


def ask(script: Script, work: Workload = WORK, limits: Limits = SHORT) -> pd.Series[Any]:
    """The row of a single request that is answered by the script."""
    with ScriptedServer(lambda _: script) as server:
        return measure(server.base_url, work, prompts(1), ONE, "m", limits=limits).requests.iloc[0]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def held(found: Measurement) -> list[str]:
    return [str(status) for status in found.requests["status"]]
