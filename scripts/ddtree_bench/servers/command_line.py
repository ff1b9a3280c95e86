"""The command line of a server, one function an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_bench.plan import Server

REFERENCE_PACKAGE = "ddtree_reference"
SGLANG_MODULE = "sglang.launch_server"
SGLANG_REPORTS = ["--enable-metrics", "--enable-cache-report"]
"""Without these /metrics is no page, and no answer tells how much of its prompt came from the prefix cache."""

REFERENCE_MODELS = {"SmolLM2-135M-Instruct": "smollm2", "toy": "toy"}
"""The models that the reference engine brings, by published name."""

SGLANG_BUILD_FLAGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "cpu": (
        ("device", "cpu"),
        # Interpreted kernels give wrong numbers in bfloat16, for AR and a tree alike.
        ("dtype", "float32"),
        # The one backend with tree masks whose kernels the interpreter runs.
        ("attention-backend", "triton"),
        ("cuda-graph-backend-decode", "disabled"),
        ("cuda-graph-backend-prefill", "disabled"),
    )
}
"""What servers of a build of SGLang cannot do without, name and value; the build is part of the environment's key."""


@dataclass(frozen=True)
class Place:
    """What a start adds to a server's launch configuration; none of it is part of the server's identity.

    `model_path` and `drafter_path` say where the target keeps the model pair, where the engine does not bring it.
    `build` names the engine's build, of which the environment's key tells already. `allow_hybrid_unsafe` is the consent
    that a tree on a hybrid model needs, given in the configuration.
    """

    python: str
    port: int
    start_id: str
    host: str = "127.0.0.1"
    model_path: str | None = None
    drafter_path: str | None = None
    build: str = ""
    allow_hybrid_unsafe: bool = False


def launch_argv(server: Server, place: Place) -> list[str]:
    """The command line that starts `server` at `place`; `server.flags` come last as --name value.

    Raises ValueError for an engine without a command line, for a model that the engine does not have, and for one
    without a path where the engine brings none.
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


def _sglang(server: Server, place: Place) -> list[str]:
    argv = [place.python, "-m", SGLANG_MODULE]
    argv += ["--model-path", _path(server.model.name, place.model_path)]
    argv += ["--served-model-name", served_model_name(server)]
    argv += ["--host", place.host, "--port", str(place.port)]
    argv += _speculation(server)
    if server.drafter is not None and server.method != "AR":
        argv += ["--speculative-draft-model-path", _path(server.drafter.name, place.drafter_path)]
    if server.method == "DDTREE" and place.allow_hybrid_unsafe:
        argv += ["--speculative-ddtree-allow-hybrid-unsafe"]
    argv += ["--max-running-requests", str(server.max_running_requests)]
    argv += ["--tp-size", str(server.tensor_parallel), "--ep-size", str(server.expert_parallel)]
    argv += SGLANG_REPORTS
    return argv + _named(SGLANG_BUILD_FLAGS.get(place.build, ())) + _flags(server)


def _path(model: str, path: str | None) -> str:
    if path is None:
        raise ValueError(f"model {model}: has no path on this target; give one in its paths")
    return path


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
    return _named(server.flags)


def _named(flags: Iterable[tuple[str, str]]) -> list[str]:
    argv = []
    for name, value in flags:
        argv += [f"--{name.removeprefix('--')}", value] if value else [f"--{name.removeprefix('--')}"]
    return argv


ENGINES: dict[str, Callable[[Server, Place], list[str]]] = {"reference": _reference, "sglang": _sglang}
