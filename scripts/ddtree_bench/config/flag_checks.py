"""Checks of launch flags: what the workflow says itself, and what DDTREE cannot be served with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ddtree_bench.config.models import Config
from ddtree_bench.config.sweep import Coordinates
from ddtree_bench.servers.command_line import SGLANG_BUILD_FLAGS, SGLANG_REPORTS

ROUND_LOG = "speculative-ddtree-round-log"
RESERVED_FLAG = re.compile(
    rf"model(-path)?|host|port|served-model-name|start-id|speculative-(?!{ROUND_LOG.removeprefix('speculative-')}$).*"
    "|max-running-requests|tp(-size)?|tensor-parallel-size|ep(-size)?|expert-parallel-size|config"
)
PIPELINE_FLAGS = ("pp-size", "pipeline-parallel-size")
BACKEND_FLAGS = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")
TREE_BACKENDS = ("triton", "flashinfer", "fa3")
"""Attention backends that mask a tree, as the plugin has them; of MLA models it refuses more at the server's start."""


def check_flags(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """Flags say nothing that keys of the configuration or the build say, and let DDTREE verify a tree."""
    problems: dict[str, None] = {}
    for point in points:
        for name, value in point.flags:
            problems |= dict.fromkeys(_problems(config, point, name.lstrip("-"), name, value))
    return list(problems)


def _problems(config: Config, point: Coordinates, flag: str, name: str, value: str) -> Iterator[str]:
    where = f"sweep[{point.block}].flags (or the target's): {name!r}"
    if RESERVED_FLAG.fullmatch(flag) or flag in _flags_of_engine(config, point):
        yield f"{where} is set by the workflow itself; use the key of the configuration that stands for it"
        return
    if flag == ROUND_LOG and (point.engine, point.method) != ("sglang", "DDTREE"):
        yield (
            f"{where} is {value!r}, but only DDTREE on SGLang writes a round log, and the block plans {point.method} "
            f"on {point.engine} too; give it in a block of DDTREE alone"
        )
    if point.engine != "sglang" or point.method != "DDTREE":
        return
    if flag in PIPELINE_FLAGS and value != "1":
        yield f"{where} is {value!r}, but DDTREE runs without pipeline parallelism only; take it out"
    if flag in BACKEND_FLAGS and value not in TREE_BACKENDS:
        yield f"{where} is {value!r}, which cannot mask a tree of DDTREE; use {', '.join(TREE_BACKENDS)}"


def _flags_of_engine(config: Config, point: Coordinates) -> set[str]:
    """The flags that every server of an engine's build gets."""
    target = config.targets[point.target]
    if point.engine != "sglang" or target.launcher == "external":
        return set()
    build = SGLANG_BUILD_FLAGS.get(target.sglang_build, ())
    return {flag.lstrip("-") for flag in SGLANG_REPORTS} | {name for name, _ in build}
