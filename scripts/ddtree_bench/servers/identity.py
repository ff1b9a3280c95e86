"""What a server must tell back of its launch, by which it is known as the one that was planned and started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_bench.plan import Server
from ddtree_bench.servers.command_line import served_model_name

START_ID = "start_id"
SGLANG_START_ID = "ddtree_start_id"
"""SGLang has no field that names a start, so our plugin tells the one that it found in START_VARIABLE."""

START_VARIABLE = "SGLANG_DDTREE_START_ID"

NAMES_OF_A_START = (START_ID, SGLANG_START_ID, "served_model_name")
"""What is known of servers that are started here alone."""


def start_variables(server: Server, start_id: str) -> dict[str, str]:
    """Return the environment variables that tell a server the name of its start; {} where its command line does."""
    return {START_VARIABLE: start_id} if server.engine == "sglang" else {}


def wanted_identity(server: Server, start_id: str) -> dict[str, Any]:
    """The fields of /server_info that a server of this plan must show; None for what its method does not have."""
    speculative = server.method != "AR"
    wanted = {
        SGLANG_START_ID if server.engine == "sglang" else START_ID: start_id,
        "served_model_name": served_model_name(server),
        "speculative_algorithm": server.method if speculative else None,
        "speculative_ddtree_budget": server.budget if server.method == "DDTREE" else None,
        "speculative_ddtree_topk_cap": server.topk_cap if server.method == "DDTREE" else None,
        "speculative_dflash_block_size": server.block_size if speculative else None,
        "speculative_num_draft_tokens": server.verify_width if speculative else None,
        "max_running_requests": server.max_running_requests,
    }
    if server.engine == "sglang":
        wanted |= {"tp_size": server.tensor_parallel, "ep_size": server.expert_parallel}
    return wanted


def differences(server: Server, start_id: str, info: Mapping[str, Any]) -> list[str]:
    """Return what a server's words about itself say otherwise than was launched, a sentence each."""
    told = _told(server, info)
    return [
        f"{name}: wanted {wanted!r}, seen {told.get(name)!r}"
        for name, wanted in wanted_identity(server, start_id).items()
        if told.get(name) != wanted
    ]


def _told(server: Server, info: Mapping[str, Any]) -> dict[str, Any]:
    """What the server says, SGLang's first rank with it: what only its scheduler process knows stands there."""
    states = info.get("internal_states")
    first = states[0] if server.engine == "sglang" and isinstance(states, list) and states else {}
    return {**(first if isinstance(first, dict) else {}), **info}
