"""The check that speculation changes nothing: greedy DFLASH and DDTREE against AR, token by token."""

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

from ddtree_reference import __version__, decode, startup, tokenizer
from ddtree_reference.decode import Engine, Method

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
    """A configuration as `parse_method` reads it."""
    if method.algorithm == "DFLASH":
        return f"DFLASH:{method.block_size}"
    return f"DDTREE:{method.budget}:{method.effective_cap}"


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Prompts from JSON lines. Raises ValueError that names the line that lacks an id or a prompt."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = json.loads(line)
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
    engine: Engine, prompts: dict[str, list[int]], methods: Sequence[Method], tokens: int, eos: int
) -> tuple[Tally, dict[str, Tally]]:
    """Answer every prompt (id -> token ids) with AR and every method: AR's tally, and each configuration's."""
    baseline = Tally(0, [], 0, 0, 0.0)
    tallies = {name_of(method): Tally(0, [], 0, 0, 0.0) for method in methods}
    for number, (prompt_id, prompt) in enumerate(prompts.items(), 1):
        expected = _run(engine, Method("AR"), prompt, tokens, eos, baseline)
        for method in methods:
            tally = tallies[name_of(method)]
            wrong = differing(expected, _run(engine, method, prompt, tokens, eos, tally))
            if wrong:
                tally.differing_tokens += wrong
                tally.differing_prompts.append(prompt_id)
        bad = sum(tally.differing_tokens for tally in tallies.values())
        print(f"[{number}/{len(prompts)}] {prompt_id}: {len(expected)} tokens, {bad} differing so far", file=sys.stderr)
    return baseline, tallies


def _run(engine: Engine, method: Method, prompt: list[int], tokens: int, eos: int, tally: Tally) -> list[int]:
    began = time.perf_counter()
    rounds = list(decode.generate(engine, method, prompt, tokens, eos))
    answer = [token for step in rounds for token in step.tokens]
    tally.seconds += time.perf_counter() - began
    tally.tokens += len(answer)
    tally.rounds += len(rounds) - 1
    return answer


def main(options: argparse.Namespace) -> int:
    """Run the check as the command line asks: 0 if every token is equal, 1 if not."""
    entries = read_prompts(options.prompts)[: options.limit]
    methods = [parse_method(text) for text in options.configs] if options.configs else default_methods()
    torch.set_num_threads(options.threads)
    opened = startup.open_engine(options.model, options.numerics, methods)
    for method in methods:
        decode.check_method(opened.engine, method)
    prompts = {}
    for entry in entries:
        text = tokenizer.render_chat(opened.tokenizer, [{"role": "user", "content": entry["prompt"]}])
        prompts[entry["id"]] = tokenizer.encode(opened.tokenizer, text)
    baseline, tallies = compare(opened.engine, prompts, methods, options.tokens, opened.tokenizer.eos)
    numerics = opened.engine.target.numerics
    print(f"{len(prompts)} prompts, {baseline.tokens} tokens of AR, up to {options.tokens} each, numerics {numerics}")
    print(f"{'configuration':<16}{'differing tokens':>18}{'tokens a round':>16}{'tok/s':>8}")
    for name, tally in {"AR": baseline, **tallies}.items():
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
        "baseline": asdict(baseline),
        "configurations": {name: asdict(tally) for name, tally in tallies.items()},
        "differing_tokens": sum(tally.differing_tokens for tally in tallies.values()),
    }
