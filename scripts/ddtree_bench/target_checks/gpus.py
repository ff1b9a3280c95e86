"""Checks of a target's GPUs against what the plan's servers take: there, enough, idle, at their full power."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree_bench.config.flag_checks import PIPELINE_FLAGS
from ddtree_bench.config.models import Target
from ddtree_bench.plan import Server
from ddtree_bench.target_checks.facts import Facts
from ddtree_bench.target_checks.findings import Finding

HIDDEN_MIB = 1024
"""Memory that is in use on a GPU although no process is listed for it; the driver's own share is less."""


def gpus_needed(spec: Target, servers: Sequence[Server]) -> int:
    """Return how many GPUs the largest server of a target takes; SGLang splits experts within the tensor parallel ones.

    0 where engine or build serve on CPUs.
    """
    on_gpus = [server for server in servers if server.engine == "sglang" and spec.sglang_build != "cpu"]
    return max((server.tensor_parallel * _stages(server) for server in on_gpus), default=0)


def _stages(server: Server) -> int:
    given = [int(value) for name, value in server.flags if name.lstrip("-") in PIPELINE_FLAGS and value.isdigit()]
    return max(given, default=1)


def check_gpus(target: str, facts: Facts, needed: int, busy: bool) -> Iterator[Finding]:
    """Yield what is to be said of a target's GPUs, of which `needed` are taken; `busy` while a run holds the lease."""
    if not needed:
        return
    gpus = facts.gpus
    if len(gpus) < needed:
        yield Finding(target, "GPUs", "problem", f"the plan takes {needed}; {_seen(facts)}", _remedy(facts))
        return
    names = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus))
    yield Finding(target, "GPUs", "ok", f"{len(gpus)} x {names}; the plan takes {needed}")
    yield _idle(target, _users(facts), needed, busy)
    yield from _settings(target, facts)


def _seen(facts: Facts) -> str:
    error = facts.one("gpu_error")
    if error is not None:
        return f"nvidia-smi says: {error}"
    return f"nvidia-smi names {len(facts.gpus)}" if facts.gpus else "there is no nvidia-smi"


def _remedy(facts: Facts) -> str:
    if facts.gpus:
        return "lower tensor_parallel in the sweep, or choose another target"
    return "install NVIDIA's driver there, or choose another target"


def _users(facts: Facts) -> list[tuple[int, str]]:
    """Who uses which GPU: its index, and the process in words."""
    index = {gpu["uuid"]: int(gpu["index"]) for gpu in facts.gpus}
    users = [(index[uuid], process) for uuid, process in facts.gpu_processes if uuid in index]
    listed = {number for number, _ in users}
    users += [
        (int(gpu["index"]), f"{gpu['used_mib']} MiB taken by a process that this user cannot see")
        for gpu in facts.gpus
        if int(gpu["index"]) not in listed and gpu["used_mib"].isdigit() and int(gpu["used_mib"]) > HIDDEN_MIB
    ]
    return sorted(users)


def _idle(target: str, users: Sequence[tuple[int, str]], needed: int, busy: bool) -> Finding:
    """Servers take the first GPUs; whoever computes on the others takes no memory, but may take clocks and links."""
    if not users:
        return Finding(target, "GPUs idle", "ok", "nothing computes on them")
    words = "in use: " + ", ".join(f"GPU {index} ({who})" for index, who in users)
    if busy:
        return Finding(target, "GPUs idle", "note", f"{words}, while a run holds the lease")
    if any(index < needed for index, _ in users):
        return Finding(target, "GPUs idle", "problem", words, "end these processes, or wait for their end")
    return Finding(target, "GPUs idle", "note", f"{words}; the plan's servers take the others")


def _settings(target: str, facts: Facts) -> Iterator[Finding]:
    off = [gpu["index"] for gpu in facts.gpus if gpu["persistence"] == "Disabled"]
    if off:
        words = f"persistence mode is off on GPU {', '.join(off)}: each start waits for the driver"
        yield Finding(target, "GPU settings", "note", words, "nvidia-smi -pm 1")
    lowered = [gpu for gpu in facts.gpus if gpu["power_w"] != gpu["default_power_w"]]
    if lowered:
        named = ", ".join(f"GPU {gpu['index']} {gpu['power_w']} W, not {gpu['default_power_w']} W" for gpu in lowered)
        yield Finding(target, "GPU settings", "note", f"power limits are not those by default: {named}")
