"""Rounds of the real SGLang server, replayed through the embedded engine's tree builder and walk.

    PYTHONPATH=tests/sglang:envs/sglang/plugin:envs/sglang/micro_models:envs/reference \\
        python tests/benchmarks/sglang_replay.py --models FOLDER [--prompts 24] [--tokens 128] [--budget 32]

FOLDER has a micro model's `target` and `drafter`; DDTREE_BENCH_SGLANG_PYTHON names the interpreter that has SGLang.
The test of the same name in tests/sglang says what is compared. Fails with the first difference.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lossless
import probed
import replay
from trained_models import ModelPair


def main() -> None:
    """Serve, replay, and print what was compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, default=32)
    given = parser.parse_args()
    models = ModelPair(given.models / "target", given.models / "drafter")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = lossless.prompts(models.target, given.prompts)
        with probed.probed_server(models, given.budget, folder) as server, probed.saved_rounds(folder) as saved:
            lossless.in_one_batch(server, prompts, given.tokens)
        rounds = [list(replay.steps(path)) for path in sorted(saved.glob("*.pt"))]
    steps = [step for one in rounds for step in one]
    for step in steps:
        replay.check(step)
        smaller: set[tuple[int, ...]] = set()
        for budget in range(1, given.budget + 1):
            larger = replay.nodes(step, budget)
            assert smaller < larger, f"the tree of budget {budget} lacks nodes of that of {budget - 1}"
            smaller = larger
    accepted = sum(len(step.accepted) - 1 for step in steps)
    print(
        f"{len(rounds)} rounds of a batch, {len(steps)} of a request, {accepted} drafts accepted: all as the embedded"
    )
    print(f"engine builds and walks; every tree of 1 to {given.budget} nodes is part of the next one")
    lengths = replay.accept_lengths(rounds, (8, 16, given.budget))
    print("pooled accept length by budget: " + ", ".join(f"{b}: {length:.3f}" for b, length in lengths.items()))


if __name__ == "__main__":
    main()
