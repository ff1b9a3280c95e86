"""The joint law of tokens 2 to 4 of DDTREE at temperature 1 on the real SGLang server, by 20,000 draws.

    PYTHONPATH=tests/sglang python tests/benchmarks/sglang_sampled_law.py --models FOLDER [--draws 20000]

FOLDER has a micro model's `target` and `drafter`; DDTREE_BENCH_SGLANG_PYTHON names the interpreter that has SGLang. The
test of the same name in tests/sglang says what is compared. Returns 1 if the law is rejected or a mutant is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import hugging_face_law
import law
import probed
from sglang_server import sglang_python
from test_sampled_law import BATCH, BUDGET, MUTANT_DRAWS, PROMPT
from trained_models import ModelPair


def main() -> int:
    """Draw, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=20_000)
    given = parser.parse_args()
    models = ModelPair(given.models / "target", given.models / "drafter")
    exact = hugging_face_law.joint_law(sglang_python(), models.target, PROMPT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with probed.probed_server(models, BUDGET, folder, ("--max-running-requests", str(BATCH))) as server:
            began = time.monotonic()
            drawn = law.draw(server, PROMPT, given.draws, BATCH)
            seconds = time.monotonic() - began
            good = law.p_value(exact, drawn.counts)
            print(f"{given.draws} draws in {seconds:.0f} s, {drawn.rounds} rounds of a request, {drawn.accepted} of")
            print(f"{drawn.proposed} drafts accepted ({drawn.acceptance:.1%}), budget {BUDGET}; p = {good:.4f}")
            passed = good > law.REJECT_BELOW and drawn.acceptance >= 0.3
            for mutant in ("prefers_drafts", "siblings_row"):
                with probed.mutant(folder, mutant):
                    bad = law.p_value(exact, law.draw(server, PROMPT, MUTANT_DRAWS, BATCH).counts)
                print(f"mutant {mutant}: p = {bad:.1e} with {MUTANT_DRAWS} draws")
                passed = passed and bad < law.REJECT_BELOW
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
