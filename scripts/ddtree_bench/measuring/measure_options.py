"""The arguments of `measure`: what they are, what is refused, and the measurement that they ask for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_bench.load.arrivals import STAGGER_S
from ddtree_bench.load.bodies import OPTIONAL
from ddtree_bench.load.exchange import DEFAULT_LIMITS, Limits
from ddtree_bench.load.prompts import Prompt, prompt_set_sha256, read_plain, take
from ddtree_bench.load.tokenizer import Tokenizer, TokenizerError
from ddtree_bench.measuring import argument_types
from ddtree_bench.metrics.slos import Slos
from ddtree_bench.plan import Load, Workload

MOST_IN_FLIGHT = 1024
"""Most requests in flight of an open loop that does not say."""

LONGEST_S = 1e6
"""Longest time limit, s: what the system's own waits can hold is not far above it."""

RATES = (1e-3, 1e6)
"""Rates from the lowest to the highest, requests/s."""

METHODS = ("AR", "DFLASH", "DDTREE")

SLO_FIELDS = {name.removesuffix("_s"): name for name in Slos.__dataclass_fields__}
"""Names of objectives on the command line, and those of Slos."""


class UsageError(ValueError):
    """Arguments that cannot be used together or name what is not there; the message says which and what to do."""


@dataclass(frozen=True)
class Asked:
    """A measurement as asked for; `headers` may hold a key and are kept out of records and of what is printed."""

    url: str
    model: str
    method: str | None
    workload: Workload
    prompts: tuple[Prompt, ...]
    load: Load
    limits: Limits
    stagger_s: float
    seed: int
    slos: Slos | None
    tokenizer: Path | None
    omit: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `measure`."""
    _add_what(parser)
    _add_load(parser)
    _add_limits(parser)
    add_computing(parser)
    parser.add_argument(
        "--omit",
        action="append",
        choices=OPTIONAL,
        default=[],
        metavar="FIELD",
        help=f"field not to send, for a server that refuses it; may be given more than once: {', '.join(OPTIONAL)}",
    )
    parser.add_argument("--method", choices=METHODS, help="how the server decodes, where you know it")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the server's API key")
    parser.add_argument(
        "--out", required=True, type=argument_types.folder, metavar="DIR", help="folder for the result; made if missing"
    )


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, type=argument_types.base_url, help="the server, with or without /v1")
    parser.add_argument(
        "--model", required=True, type=argument_types.text, metavar="NAME", help="model name that is sent"
    )
    parser.add_argument(
        "--prompts", required=True, type=Path, metavar="FILE.jsonl", help='lines {"id", "prompt"} or {"id", "messages"}'
    )
    parser.add_argument(
        "--num-requests", required=True, type=argument_types.requests, metavar="N", help="requests, prompts in order"
    )
    parser.add_argument("--repeat-prompts", action="store_true", help="start over when there are fewer prompts than N")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="default: chat")
    parser.add_argument(
        "--max-tokens", required=True, type=argument_types.count, metavar="M", help="most output tokens a request"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="run every answer to M tokens")
    parser.add_argument(
        "--temperature", type=argument_types.number(0, most=1000), default=0.0, metavar="T", help="default: 0, greedy"
    )
    parser.add_argument(
        "--top-p", type=argument_types.number(0, above=True, most=1), default=1.0, metavar="P", help="default: 1"
    )
    parser.add_argument("--top-k", type=argument_types.top_k, default=-1, metavar="K", help="default: -1, no limit")
    parser.add_argument(
        "--seed", type=argument_types.whole, default=0, help="of sampling and of Poisson arrivals; default: 0"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency",
        type=argument_types.count,
        metavar="C",
        help=f"requests kept in flight; with --rate the most in flight (default: N, at most {MOST_IN_FLIGHT})",
    )
    parser.add_argument(
        "--rate",
        type=argument_types.number(RATES[0], most=RATES[1]),
        metavar="R",
        help="requests that arrive a second",
    )
    parser.add_argument("--arrivals", choices=("poisson", "constant"), help="of --rate; default: poisson")
    parser.add_argument(
        "--stagger-ms",
        type=argument_types.number(0, most=LONGEST_S),
        default=STAGGER_S * 1e3,
        metavar="MS",
        help="pause between the first requests of two users; default: %(default)g",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = (
        ("--request-timeout", DEFAULT_LIMITS.request_s, "longest time for one request"),
        ("--idle-timeout", DEFAULT_LIMITS.idle_s, "longest silence of an answer, the wait for its start included"),
        ("--deadline", DEFAULT_LIMITS.cell_s, "longest time for the whole measurement"),
    )
    for name, default, what in limits:
        parser.add_argument(
            name,
            type=argument_types.number(0, above=True, most=LONGEST_S),
            default=default,
            metavar="S",
            help=f"{what}, s; default: %(default)g",
        )


def add_computing(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that change only what is computed from the stamps."""
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or its folder, to count tokens without usage"
    )
    parser.add_argument(
        "--slo",
        action="append",
        type=_slo,
        default=[],
        metavar="NAME=S",
        help=f"objective for goodput: {', '.join(SLO_FIELDS)}, s; may be given more than once",
    )


def asked(parsed: argparse.Namespace) -> Asked:
    """Return the measurement that parsed arguments ask for. Raises UsageError and PromptError."""
    given = read_plain(parsed.prompts)
    if parsed.num_requests > len(given) and not parsed.repeat_prompts:
        raise UsageError(
            f"--num-requests: {parsed.num_requests}, and {parsed.prompts} holds {len(given)} prompts; "
            "lower it, add prompts or give --repeat-prompts"
        )
    prompts = take(given, parsed.num_requests, parsed.repeat_prompts)
    if parsed.endpoint == "completions" and (chat := next((one for one in prompts if one.messages), None)):
        raise UsageError(f"--endpoint completions: the prompt {chat.id!r} has messages; use chat or prompts of text")
    return Asked(
        url=parsed.url,
        model=parsed.model,
        method=parsed.method,
        workload=_workload(parsed, prompts),
        prompts=prompts,
        load=_load(parsed),
        limits=Limits(idle_s=parsed.idle_timeout, request_s=parsed.request_timeout, cell_s=parsed.deadline),
        stagger_s=parsed.stagger_ms / 1e3,
        seed=parsed.seed,
        slos=slos(parsed.slo),
        tokenizer=parsed.tokenizer,
        omit=tuple(parsed.omit),
        headers=_headers(parsed.api_key_env),
    )


def slos(pairs: Sequence[tuple[str, float]]) -> Slos | None:
    """Return the objectives of --slo, None where none were given. Raises UsageError for one that is given twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise UsageError(f"--slo: {', '.join(name for name, _ in pairs)}; give each once")
    return Slos(**{SLO_FIELDS[name]: value for name, value in values.items()}) if values else None


def tokenizer(path: Path | None) -> Tokenizer | None:
    """Return the tokenizer of --tokenizer. Raises UsageError when it cannot be read."""
    if path is None:
        return None
    try:
        return Tokenizer.from_path(path)
    except TokenizerError as error:
        raise UsageError(f"--tokenizer: {error}") from error


def _slo(given: str) -> tuple[str, float]:
    name, _, limit = given.partition("=")
    if name not in SLO_FIELDS:
        raise argparse.ArgumentTypeError(f"{given!r}; give NAME=S with one of {', '.join(SLO_FIELDS)}")
    return name, argument_types.number(0, above=True)(limit)


def _load(parsed: argparse.Namespace) -> Load:
    if parsed.rate is None:
        if parsed.concurrency is None:
            raise UsageError("--concurrency: is missing; give it, or --rate for requests that arrive at a rate")
        if parsed.arrivals is not None:
            raise UsageError(f"--arrivals {parsed.arrivals}: is of no use without --rate; give both or neither")
        return Load(parsed.concurrency)
    most = parsed.concurrency or min(parsed.num_requests, MOST_IN_FLIGHT)
    return Load(most, "open", parsed.rate, parsed.arrivals or "poisson")


def _workload(parsed: argparse.Namespace, prompts: Sequence[Prompt]) -> Workload:
    return Workload(
        name=parsed.prompts.stem,
        prompts=str(parsed.prompts),
        blocks=None,
        n_prompts=len(prompts),
        prompts_sha256=prompt_set_sha256(prompts),
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        seed=parsed.seed,
        ignore_eos=parsed.ignore_eos,
        repeat_prompts=parsed.repeat_prompts,
        endpoint=parsed.endpoint,
    )


def _headers(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"--api-key-env {variable}: no such variable, or no key in it; set it to the key")
    return {"Authorization": f"Bearer {key}"}
