"""Environment variables that a build of an engine needs, to be started at all or to serve as it is meant to."""

from __future__ import annotations

from collections.abc import Mapping

from ddtree_bench.environments.recipes import ADOPTED

VARIABLES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("sglang", "cpu"): {
        # Triton's kernels are interpreted, since Triton compiles for GPUs alone.
        "TRITON_INTERPRET": "1",
        # SGLang's own CPU engine needs a kernel package that no index has.
        "SGLANG_USE_CPU_ENGINE": "0",
        # Models lie on the disk; a look at the hub would only wait for its time-out.
        "HF_HUB_OFFLINE": "1",
    },
}


def engine_variables(engine: str, build: str = "") -> dict[str, str]:
    """Return the variables, name to value, with which servers of a build of an engine are started; {} for most."""
    return dict(VARIABLES.get((engine, build.removeprefix(f"{ADOPTED}-")), {}))
