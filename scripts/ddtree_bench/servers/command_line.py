"""The command line of a server, one function an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_bench.plan import Server

REFERENCE_PACKAGE = "ddtree_reference"
REFERENCE_MODELS = {"SmolLM2-135M-Instruct": "smollm2", "toy": "toy"}
"""The models that the reference engine brings, by published name."""


@dataclass(frozen=True)
class Place:
    """What a start adds to a server's launch configuration; none of it is part of the server's identity.

    `model_path` and `drafter_path` say where the target keeps the model pair, where the engine does not bring it.
    """

    python: str
    port: int
    start_id: str
    host: str = "127.0.0.1"
    model_path: str | None = None
    drafter_path: str | None = None


def launch_argv(server: Server, place: Place) -> list[str]:
    """The command line that starts `server` at `place`; `server.flags` come last as --name value.

    Raises ValueError for an engine without a command line, and for a model that the engine does not have.
    """
    build = ENGINES.get(server.engine)
    if build is None:
        raise ValueError(f"engine: {server.engine!r} cannot be started; engines: {', '.join(sorted(ENGINES))}")
    return build(server, place)


def served_model_name(server: Server) -> str:
    """The model name that clients put into their requests."""
    return server.model.name


def reference_model(name: str) -> str:
    """The reference engine's own name for a published model name; raises ValueError for one that it does not have."""
    if name not in REFERENCE_MODELS:
        raise ValueError(f"model: {name!r} is not one the reference engine has; it has {', '.join(REFERENCE_MODELS)}")
    return REFERENCE_MODELS[name]


def _reference(server: Server, place: Place) -> list[str]:
    argv = [place.python, "-m", REFERENCE_PACKAGE, "serve"]
    argv += ["--host", place.host, "--port", str(place.port)]
    argv += ["--model", reference_model(server.model.name)]
    argv += ["--served-model-name", served_model_name(server)]
    argv += _speculation(server)
    argv += ["--max-running-requests", str(server.max_running_requests)]
    argv += ["--start-id", place.start_id]
    return argv + _flags(server)


def _speculation(server: Server) -> list[str]:
    """The options of the method, under SGLang's names; none for AR."""
    if server.method == "AR":
        return []
    argv = ["--speculative-algorithm", server.method]
    if server.block_size is not None:
        argv += ["--speculative-dflash-block-size", str(server.block_size)]
    if server.method == "DDTREE":
        argv += ["--speculative-ddtree-budget", str(server.budget)]
        argv += ["--speculative-ddtree-topk-cap", str(server.topk_cap)]
    return argv


def _flags(server: Server) -> list[str]:
    """Further flags; one with an empty value is a switch."""
    argv = []
    for name, value in server.flags:
        argv += [f"--{name.removeprefix('--')}", value] if value else [f"--{name.removeprefix('--')}"]
    return argv


ENGINES: dict[str, Callable[[Server, Place], list[str]]] = {"reference": _reference}
