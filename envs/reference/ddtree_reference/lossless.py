"""The check that speculation and batching change nothing: greedy answers against those of AR alone, token by token."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree_reference import __version__, startup, tokenizer
from ddtree_reference.decode import Engine
from ddtree_reference.method import Method
from ddtree_reference.scheduler import Scheduler
from ddtree_reference.sequence import Request

BUDGETS = (1, 4, 8, 15, 16, 32, 64)
CAPS = (1, 8, None)  # None: the budget


@dataclass
class Tally:
    """What one configuration did over all prompts; `differing_prompts` holds ids."""

    differing_tokens: int
    differing_prompts: list[str]
    tokens: int
    rounds: int
    seconds: float


def default_methods() -> list[Method]:
    """DFLASH, and DDTREE at every budget and cap, each effective configuration once."""
    caps = {budget: sorted({min(cap or budget, budget) for cap in CAPS}) for budget in BUDGETS}
    trees = [Method("DDTREE", budget=budget, topk_cap=cap) for budget in BUDGETS for cap in caps[budget]]
    return [Method("DFLASH"), *trees]


def parse_method(text: str) -> Method:
    """A method from DFLASH[:BLOCK] or DDTREE:BUDGET[:CAP]. Raises ValueError for another form."""
    algorithm, *numbers = text.split(":")
    try:
        values = [int(number) for number in numbers]
    except ValueError:
        values = [0]
    if algorithm == "DFLASH" and len(values) <= 1 and 0 not in values:
        return Method("DFLASH", block_size=values[0]) if values else Method("DFLASH")
    if algorithm == "DDTREE" and len(values) in (1, 2) and 0 not in values:
        return Method("DDTREE", budget=values[0], topk_cap=values[-1])
    raise ValueError(f"configuration {text!r}: use DFLASH, DFLASH:BLOCK, DDTREE:BUDGET or DDTREE:BUDGET:CAP")


def name_of(method: Method) -> str:
    """A configuration as `parse_method` reads it, or AR."""
    if method.algorithm == "AR":
        return "AR"
    if method.algorithm == "DFLASH":
        return f"DFLASH:{method.block_size}"
    return f"DDTREE:{method.budget}:{method.effective_cap}"


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Prompts from JSON lines. Raises ValueError that names the line that lacks an id or a prompt."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from error
        if not isinstance(entry, dict) or not entry.get("id") or not entry.get("prompt"):
            raise ValueError(f'{path}:{number}: each line needs "id" and "prompt"')
        prompts.append(entry)
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def differing(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens from the first difference of two answers to the end of the longer one."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return max(len(a), len(b)) - same


def compare(
    engine: Engine, prompts: dict[str, list[int]], methods: Sequence[Method], tokens: int, eos: int, batch: int = 1
) -> tuple[Tally, dict[str, Tally]]:
    """Answer every prompt (id -> token ids) with AR alone and with every method: AR's tally, and each configuration's.

    With `batch` above 1 the methods, AR among them, answer that many prompts at a time: whenever one answer ends the
    next prompt joins the batch.
    """
    requests = {prompt_id: Request(tuple(prompt), tokens, eos) for prompt_id, prompt in prompts.items()}
    expected, baseline = _answer_all(engine, Method("AR"), requests, 1)
    tallies = {}
    for method in ([Method("AR")] if batch > 1 else []) + list(methods):
        answers, tally = _answer_all(engine, method, requests, batch)
        wrong = {prompt_id: differing(expected[prompt_id], answers[prompt_id]) for prompt_id in prompts}
        tally.differing_tokens = sum(wrong.values())
        tally.differing_prompts = [prompt_id for prompt_id, count in wrong.items() if count]
        tallies[name_of(method)] = tally
        print(f"{name_of(method)}: {tally.tokens} tokens, {tally.differing_tokens} differing", file=sys.stderr)
    return baseline, tallies


def _answer_all(
    engine: Engine, method: Method, requests: dict[str, Request], batch: int
) -> tuple[dict[str, list[int]], Tally]:
    """The answers by id, at most `batch` at a time, and what they took."""
    began = time.perf_counter()
    scheduler: Scheduler[str] = Scheduler(engine, method)
    answers: dict[str, list[int]] = {prompt_id: [] for prompt_id in requests}
    waiting, rounds = list(requests.items()), 0
    while waiting or scheduler.running:
        while waiting and scheduler.running + scheduler.waiting < batch:
            scheduler.add(*waiting.pop(0))
        for advance in scheduler.step():
            answers[advance.key] += advance.round.tokens
            rounds += advance.round.width > 0
    tokens = sum(len(answer) for answer in answers.values())
    return answers, Tally(0, [], tokens, rounds, time.perf_counter() - began)


def main(options: argparse.Namespace) -> int:
    """Run the check as the command line asks: 0 if every token is equal, 1 if not."""
    entries = read_prompts(options.prompts)[: options.limit]
    methods = [parse_method(text) for text in options.configs] if options.configs else default_methods()
    torch.set_num_threads(options.threads)
    opened = startup.open_engine(options.model, options.numerics, methods, options.batch)
    prompts = {}
    for entry in entries:
        text = tokenizer.render_chat(opened.tokenizer, [{"role": "user", "content": entry["prompt"]}])
        prompts[entry["id"]] = tokenizer.encode(opened.tokenizer, text)
    baseline, tallies = compare(opened.engine, prompts, methods, options.tokens, opened.tokenizer.eos, options.batch)
    numerics = opened.engine.target.numerics
    print(
        f"{len(prompts)} prompts, {baseline.tokens} tokens of AR, up to {options.tokens} each, "
        f"{options.batch} at a time, numerics {numerics}"
    )
    print(f"{'configuration':<16}{'differing tokens':>18}{'tokens a round':>16}{'tok/s':>8}")
    for name, tally in {"AR alone": baseline, **tallies}.items():
        per_round = (tally.tokens - len(prompts)) / max(tally.rounds, 1)
        print(f"{name:<16}{tally.differing_tokens:>18}{per_round:>16.2f}{tally.tokens / tally.seconds:>8.1f}")
    if options.output:
        options.output.write_text(
            json.dumps(_result(options, opened, len(prompts), baseline, tallies), indent=2) + "\n"
        )
    return int(any(tally.differing_tokens for tally in tallies.values()))


def _result(
    options: argparse.Namespace,
    opened: startup.Opened,
    n_prompts: int,
    baseline: Tally,
    tallies: dict[str, Tally],
) -> dict[str, Any]:
    return {
        "version": __version__,
        "model": options.model,
        "numerics": opened.engine.target.numerics,
        "self_test": asdict(opened.self_test),
        "prompts": n_prompts,
        "max_tokens": options.tokens,
        "batch": options.batch,
        "baseline": asdict(baseline),
        "configurations": {name: asdict(tally) for name, tally in tallies.items()},
        "differing_tokens": sum(tally.differing_tokens for tally in tallies.values()),
    }
