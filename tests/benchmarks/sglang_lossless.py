"""Whether greedy answers of the real SGLang server are lossless at every budget and cap, alone and in one batch.

    PYTHONPATH=tests/sglang:envs/sglang/micro_models python tests/benchmarks/sglang_lossless.py [--kind plain]
        [--budgets 1 4 ...] [--caps 1 4 budget]

AR is compared with Hugging Face in float32, DFLASH and every DDTREE server with AR: 8 prompts x 64 tokens. Prints a row
a server (differing tokens, tokens a verified round commits) and exits with 1 when any token differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hugging_face_greedy
from lossless import differing, in_one_batch, one_by_one, prompts, tokens_per_round
from sglang_server import SGLangServer, sglang_python
from trained_models import ModelPair, micro_model

TOKENS = 64
POOL = {"hybrid_gdn": ("--max-mamba-cache-size", "64")}
"""By default the pool of recurrent states takes 3.7 GB."""
CONSENT = {"hybrid_gdn": ("--speculative-ddtree-allow-hybrid-unsafe",)}


class Case(NamedTuple):
    """A server: its method and, for DDTREE, budget and cap."""

    algorithm: str | None = None
    budget: int | None = None
    cap: int | None = None


def cases(budgets: Sequence[int], caps: Sequence[str]) -> Iterator[Case]:
    """DFLASH, and every DDTREE server whose tree is another one: a cap above the budget is the budget."""
    yield Case("DFLASH")
    for budget in budgets:
        for cap in sorted({budget if cap == "budget" else min(int(cap), budget) for cap in caps}):
            yield Case("DDTREE", budget, cap)


def answers_of(case: Case, kind: str, pair: ModelPair, inputs: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """The answers alone and in one batch."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SGLangServer(
            pair.target,
            drafter_path=pair.drafter if case.algorithm else None,
            algorithm=case.algorithm,
            budget=case.budget,
            topk_cap=case.cap,
            extra_args=[*POOL.get(kind, ()), *(CONSENT.get(kind, ()) if case.algorithm == "DDTREE" else ())],
            log_path=Path(folder) / "log",
        ) as server,
    ):
        return one_by_one(server, inputs, TOKENS), in_one_batch(server, inputs, TOKENS)


def main() -> int:
    """Print the table; 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="plain", choices=("plain", "mla_moe", "hybrid_gdn"))
    parser.add_argument("--budgets", type=int, nargs="*", default=[1, 4, 7, 8, 15, 16, 32])
    parser.add_argument("--caps", nargs="*", default=["1", "4", "budget"])
    chosen = parser.parse_args()
    pair = micro_model(chosen.kind, sglang_python())
    inputs = prompts(pair.target, 8)
    wanted = hugging_face_greedy.greedy(sglang_python(), pair.target, inputs, TOKENS)
    print(f"{'server':<24}{'alone':>8}{'batch':>8}{'tokens/round':>14}{'seconds':>9}")
    wrong = 0
    for case in (Case(), *cases(chosen.budgets, chosen.caps)):
        began = time.monotonic()
        alone, batch = answers_of(case, chosen.kind, pair, inputs)
        found = differing(alone, wanted), differing(batch, wanted)
        wrong += sum(found)
        name = " ".join(str(part) for part in case if part is not None) or "AR"
        per_round = f"{tokens_per_round(alone):.2f}" if case.algorithm else ""
        print(f"{name:<24}{found[0]:>8}{found[1]:>8}{per_round:>14}{time.monotonic() - began:>9.0f}", flush=True)
        if case.algorithm is None:
            wanted = [answer["output_ids"] for answer in alone]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
