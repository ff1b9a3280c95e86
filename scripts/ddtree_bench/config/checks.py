"""Semantic checks: what types cannot say. Each returns sentences that name the key, the value and the remedy."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from sysconfig import get_platform
from typing import Any
from urllib.parse import urlsplit

from ddtree_bench.config.models import Config, Target
from ddtree_bench.config.sweep import METHODS_WITH_DRAFTER, Coordinates
from ddtree_bench.environments.key import patches_of
from ddtree_bench.environments.recipes import environment_of, missing_wheels, python_tag
from ddtree_bench.environments.variables import engine_variables
from ddtree_bench.load.cell_prompts import cell_prompts
from ddtree_bench.load.prompts import Prompt, PromptError
from ddtree_bench.load.prompts import read as read_prompts
from ddtree_bench.load.tokenizer_file import FILE as TOKENIZER_FILE
from ddtree_bench.load.tokenizer_file import file_of as tokenizer_file
from ddtree_bench.servers.command_line import REFERENCE_MODELS
from ddtree_bench.targets.external import endpoint_of

SECRET_KEY = re.compile(r"(^|_)(password|passwd|secret|token|api_?key|access_?key|private_?key)$", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
LOGIT_BYTES = 4
"""A graph keeps one fp32 logit for each row and word of the vocabulary."""


def check_secrets(tree: Mapping[str, Any], where: str = "") -> list[str]:
    """Find keys and values that look like secrets anywhere in the tree as it was read."""
    found: list[str] = []
    for key, value in tree.items():
        path = f"{where}.{key}" if where else str(key)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                found += check_secrets(part, path)
            elif part not in (None, "", True, False) and _is_secret(str(key), str(part)):
                found.append(
                    f"{path}: looks like a secret ({len(str(part))} characters); keep it out of the file: "
                    "set it in your environment and name the variable in targets.<name>.pass_env, or in "
                    "targets.<name>.api_key_env when it is the key of an external endpoint"
                )
    return found


def _is_secret(key: str, value: str) -> bool:
    return bool(SECRET_KEY.search(key.replace("-", "_")) or SECRET_VALUE.search(value))


def check_local_targets(config: Config) -> list[str]:
    """Servers of the local launcher listen on this machine's loopback address, and nowhere else."""
    return [
        f"targets.{name}.host: {target.host!r}, but the local launcher serves on 127.0.0.1 only; leave the key out"
        for name, target in config.targets.items()
        if target.launcher == "local" and target.host != "127.0.0.1"
    ]


EXTERNAL_KEYS = ("url", "served_model", "api_key_env", "flush_cache")
"""Keys of a target that have a meaning for an external endpoint alone."""


STARTED_KEYS = ("host", "port", "root", "stop_grace_s", "pass_env", "graph_memory_gib", "sglang_build", "adopt")
"""Keys of a target that have a meaning for servers that are started alone."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_external_targets(config: Config) -> list[str]:
    """An external endpoint has an address and nothing that is started; no other target has its keys."""
    problems = []
    for name, target in config.targets.items():
        if target.launcher == "external":
            problems += _url_problems(f"targets.{name}.url", target.url)
            problems += _variable_problems(f"targets.{name}.api_key_env", target.api_key_env)
            problems += [
                f"targets.{name}.{key}: is for servers that are started, and an external endpoint is up already; "
                "take it out"
                for key in STARTED_KEYS
                if key in target.model_fields_set
            ]
            continue
        problems += [
            f"targets.{name}.{key}: is for `launcher: external` alone, and this one is {target.launcher}; take it out"
            for key in EXTERNAL_KEYS
            if key in target.model_fields_set and getattr(target, key) is not None
        ]
    return problems


def check_engines(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """A server of a kind that the workflow does not know cannot be started by it."""
    return [
        f"engine: 'other' cannot be started on {target} by launcher {config.targets[target].launcher}; "
        "use reference or sglang, or `launcher: external` for a server that is up already"
        for target in dict.fromkeys(point.target for point in points if point.engine == "other")
        if config.targets[target].launcher != "external"
    ]


CUDA12_REFUSAL = (
    "there is none with DDTree: SGLang 0.5.19, the last release for CUDA 12, lacks seams that the plugin builds on "
    "(arg_groups.fields, spec_tree.verify_tree_greedy_func, DFlashWorkerV2 without ParallelState); "
    "use cuda13, or `launcher: external` for a server without DDTree"
)


def check_sglang_builds(config: Config, points: Sequence[Coordinates], root: Path) -> list[str]:
    """A target has a build of SGLang that the plugin can serve; one that runs no SGLang does not ask for any.

    What is needed of the build must be there for this machine, where it is put together for the target.
    """
    users = {point.target for point in points if point.engine == "sglang"}
    problems = []
    for name, target in config.targets.items():
        if target.launcher == "external":
            continue
        if target.sglang_build == "cuda12":
            problems.append(f"targets.{name}.sglang_build: 'cuda12': {CUDA12_REFUSAL}")
        if target.adopt == "":
            problems.append(
                f"targets.{name}.adopt: is empty; give an interpreter or a virtual environment, or no adopt"
            )
        elif target.adopt is not None and name not in users and any(point.target == name for point in points):
            problems.append(
                f"targets.{name}.adopt: {target.adopt!r}, but the sweep runs no SGLang there; take the key out, or set "
                "engine: sglang"
            )
        elif name in users and target.sglang_build != "cuda12":
            problems += _build_problems(f"targets.{name}", target, patches_of(root / "envs" / "sglang"))
    return problems


def _build_problems(where: str, target: Target, patches: Sequence[Path]) -> Iterator[str]:
    """Why the build of SGLang that a target takes cannot be had, and what of `pass_env` would change it."""
    environment = environment_of("sglang", target.sglang_build, adopted=target.adopt is not None)
    missing = missing_wheels(environment, python_tag(), get_platform())
    if missing:
        yield f"{where}.sglang_build: {target.sglang_build!r}: {missing}"
    if target.adopt is not None and patches:
        yield (
            f"{where}.adopt: {target.adopt!r}: an installation that is there already does not have the patch "
            f"{patches[0].name}; take `adopt` out, so that SGLang is installed with the patch"
        )
    for name, value in engine_variables(*environment).items():
        if name in target.pass_env:
            yield f"{where}.pass_env: {name!r} is set to {value} by sglang_build {target.sglang_build}; take it out"


def _variable_problems(where: str, name: str | None) -> list[str]:
    """What is wrong with the name of a variable. It may be the key itself, so it is never shown."""
    if name is None or VARIABLE.fullmatch(name):
        return []
    return [
        f"{where}: is no name of an environment variable ({len(name)} characters; letters, digits and underscores, no "
        "digit first); set the variable in your environment and give its name here, never the key"
    ]


def _url_problems(where: str, url: str | None) -> list[str]:
    if url is None:
        return [f"{where}: is missing; give the address of the endpoint, such as http://127.0.0.1:30000"]
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return [f"{where}: {url!r} is no address; write it as http://HOST:PORT"]
    if parts.username is not None or parts.password is not None:
        return [f"{where}: holds a user or a password; keep it out of the file: name a variable in api_key_env"]
    if not usable or parts.query or parts.fragment:
        return [f"{where}: {url!r} is no address of a server; write it as http://HOST:PORT, without a query"]
    return []


def check_one_server_each(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """An external endpoint is one launch configuration, so a sweep can have but one server and one target for it."""
    problems, endpoints = [], defaultdict[tuple[str, str], dict[str, Coordinates]](dict)
    for name, target in config.targets.items():
        here = [point for point in points if point.target == name]
        if target.launcher != "external" or not here:
            continue
        servers = list({point.server: point for point in here}.values())
        if len(servers) > 1:
            problems.append(_several_servers(name, servers))
        served = target.served_model or config.models[here[0].model].name
        endpoints[endpoint_of(target.url or ""), served].setdefault(name, here[0])
    for (_, served), targets in endpoints.items():
        first, *others = targets
        problems += [
            f"targets.{name}.url: {config.targets[name].url} with the model {served} is the endpoint of "
            f"targets.{first} as well, and one endpoint is one launch configuration; keep one target for it"
            for name in others
        ]
    return problems


def _several_servers(target: str, servers: Sequence[Coordinates]) -> str:
    named = ", ".join(dict.fromkeys(_described(point) for point in servers))
    return (
        f"sweep[{servers[1].block}].target: {target} is an external endpoint, which is one launch configuration, but "
        f"{len(servers)} servers are planned there ({named}); keep the one that it is, "
        "and give every other endpoint a target of its own"
    )


def _described(point: Coordinates) -> str:
    parts = [point.model, point.method]
    parts += [f"budget {point.budget}, cap {point.topk_cap}"] if point.budget is not None else []
    return " ".join(parts)


def check_references(config: Config) -> list[str]:
    """Names in sweep blocks must be keys of targets, models and workloads."""
    tables: dict[str, Sequence[str]] = {
        "target": list(config.targets),
        "model": list(config.models),
        "workload": list(config.workloads),
    }
    problems = []
    for index, block in enumerate(config.sweep):
        for key, known in tables.items():
            named = [*getattr(block, key), *(getattr(p, key) for p in [*block.include, *block.exclude])]
            for name in dict.fromkeys(n for n in named if n is not None and n not in known):
                problems.append(f"sweep[{index}].{key}: {name!r} is not in {key}s; {_nearest(name, known)}")
    return problems


def check_arrivals(config: Config) -> list[str]:
    """How requests arrive means something with a rate alone."""
    return [
        f"sweep[{index}].arrivals: {block.arrivals} without a rate, so nothing arrives; add `rate`, or take it out"
        for index, block in enumerate(config.sweep)
        if "arrivals" in block.model_fields_set and not block.rate and all(p.rate is None for p in block.include)
    ]


def check_tokenizers(config: Config, points: Sequence[Coordinates], root: Path) -> list[str]:
    """Tokenizers are files of this machine, by targets that exist; those of the sweep's models must be there."""
    problems = [
        f"models.{name}.tokenizer.{target}: {target!r} is not in targets; {_nearest(target, list(config.targets))}"
        for name, model in config.models.items()
        for target in (model.tokenizer if isinstance(model.tokenizer, dict) else ())
        if target not in config.targets
    ]
    for model, target in dict.fromkeys((point.model, point.target) for point in points):
        given = config.models[model].tokenizer
        path = given.get(target) if isinstance(given, dict) else given
        where = f"models.{model}.tokenizer" + (f".{target}" if isinstance(given, dict) else "")
        if path is not None and not tokenizer_file(root / Path(path).expanduser()).is_file():
            problems.append(f"{where}: there is no {TOKENIZER_FILE} at {path}; mend the path, or take the key out")
    return list(dict.fromkeys(problems))


def check_methods(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """DFLASH and DDTREE need a drafter and a block it was trained for; DDTREE needs a budget and an exact verify."""
    problems: dict[str, None] = {}
    for point in points:
        if point.method not in METHODS_WITH_DRAFTER:
            continue
        for problem in _method_problems(config, point):
            problems[problem] = None
    return list(problems)


def _method_problems(config: Config, point: Coordinates) -> Iterator[str]:
    model, where = config.models[point.model], f"sweep[{point.block}]"
    if model.drafter is None:
        yield f"models.{point.model}.drafter: is missing, but {where} plans {point.method}; name the drafter"
    elif point.block_size is not None and point.block_size > model.drafter.block_size:
        yield (
            f"{where}.block_size: {point.block_size} is more than the drafter was trained for; "
            f"use at most models.{point.model}.drafter.block_size = {model.drafter.block_size}"
        )
    if point.method == "DDTREE" and point.budget is None:
        yield f"{where}.budget: is missing, but DDTREE is planned; give a list of budgets such as [8, 16, 32]"
    if point.method == "DDTREE" and model.hybrid and not model.allow_hybrid_unsafe:
        yield (
            f"models.{point.model}.hybrid: true, but {where} plans DDTREE, which recurrent layers cannot verify "
            f"exactly; take DDTREE out or set models.{point.model}.allow_hybrid_unsafe: true"
        )


def check_concurrency(points: Sequence[Coordinates]) -> list[str]:
    """A server must admit what a closed loop keeps in flight: else the rest only queues. In open loop that may be."""
    problems: dict[str, None] = {}
    for point in points:
        if point.rate is None and point.concurrency > point.max_running_requests:
            problems[
                f"sweep[{point.block}].concurrency: {point.concurrency} is more than max_running_requests = "
                f"{point.max_running_requests}, so requests would only queue; "
                f"set sweep[{point.block}].max_running_requests to at least {point.concurrency}"
            ] = None
    return list(problems)


def check_graph_memory(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """CUDA graphs keep logits for max_running_requests x verify width rows."""
    problems: dict[str, None] = {}
    for point in points:
        memory, vocabulary = config.targets[point.target].graph_memory_gib, config.models[point.model].vocab_size
        if point.budget is None or memory is None or vocabulary is None:
            continue
        rows = point.max_running_requests * (point.budget + 1)
        needed = rows * vocabulary * LOGIT_BYTES / 2**30
        if needed > memory:
            problems[
                f"sweep[{point.block}].budget: {point.budget} needs {point.max_running_requests} x {point.budget + 1} "
                f"graph rows, {needed:.1f} GiB of logits, but targets.{point.target}.graph_memory_gib is {memory:g}; "
                "lower max_running_requests or the budget, or raise graph_memory_gib"
            ] = None
    return list(problems)


def check_baselines(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """Every speculative cell needs the AR cell it is compared with: same target, model, parallelism, work and load.

    An external endpoint is one server, so it has none beside it.
    """
    if config.allow_missing_baseline:
        return []
    methods: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    origin: dict[tuple[Any, ...], int] = {}
    for p in points:
        if config.targets[p.target].launcher == "external":
            continue
        parallelism, load = (p.tensor_parallel, p.expert_parallel), (p.concurrency, p.rate, p.arrivals)
        group = (p.target, p.model, *parallelism, p.workload, *load, p.engine, p.max_running_requests, p.flags)
        methods[group].add(p.method)
        origin.setdefault(group, p.block)
    problems = []
    for group, present in methods.items():
        if "AR" not in present:
            target, model, tp, ep, workload, concurrency, rate, *_ = group
            where = f"concurrency {concurrency}" if rate is None else f"rate {rate:g}"
            problems.append(
                f"sweep[{origin[group]}].method: {', '.join(sorted(present))} on {target} with {model} "
                f"(TP{tp}, EP{ep}), {workload} at {where} has no AR baseline; "
                "add AR with the same values to the sweep, or set allow_missing_baseline: true"
            )
    return problems


def check_engine_limits(config: Config, points: Sequence[Coordinates]) -> list[str]:
    """The embedded engine is one process that serves the models it brings."""
    problems: dict[str, None] = {}
    for point in points:
        if point.engine != "reference" or config.targets[point.target].launcher == "external":
            continue
        model = config.models[point.model].name
        if model not in REFERENCE_MODELS:
            problems[
                f"models.{point.model}.name: {model!r} is not a model that the reference engine brings; "
                f"use {' or '.join(REFERENCE_MODELS)}"
            ] = None
        if point.tensor_parallel > 1 or point.expert_parallel > 1:
            problems[
                f"sweep[{point.block}].tensor_parallel / expert_parallel: "
                f"{point.tensor_parallel} / {point.expert_parallel}, but the reference engine is one process; use 1"
            ] = None
    return list(problems)


def check_prompts(config: Config, points: Sequence[Coordinates], root: Path) -> list[str]:
    """Prompt files must be readable, their prompts unique, and enough for every concurrency; warm-up is disjoint."""
    problems: dict[str, None] = {}
    files: dict[str, Sequence[Prompt]] = {}
    for name, key in [
        *((config.workloads[w].prompts, f"workloads.{w}.prompts") for w in dict.fromkeys(p.workload for p in points)),
        (config.warmup.prompts, "warmup.prompts"),
    ]:
        try:
            files[name] = read_prompts(root / name)
        except PromptError as error:
            problems[f"{key}: {error}"] = None
    warm = {prompt.sha256: prompt.id for prompt in files.get(config.warmup.prompts, ())}
    for workload, concurrency, rate in dict.fromkeys((p.workload, p.concurrency, p.rate) for p in points):
        spec = config.workloads[workload]
        if spec.prompts not in files:
            continue
        try:
            chosen = cell_prompts(spec, files[spec.prompts], concurrency, rate)
        except PromptError as error:
            problems[f"workloads.{workload}: {error}"] = None
            continue
        for prompt in chosen:
            if prompt.sha256 in warm:
                problems[
                    f"warmup.prompts: {warm[prompt.sha256]!r} in {config.warmup.prompts} is prompt {prompt.id!r} of "
                    f"workloads.{workload}; take it out of one of the files"
                ] = None
    return list(problems)


def _nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
