"""KV slots in use after 10,000 rounds of mixed batches with aborts on the real SGLang server with DDTREE.

    PYTHONPATH=tests/sglang python tests/benchmarks/sglang_kv_pool.py --models FOLDER [--rounds 10000] [--page-size 1]

FOLDER has a micro model's `target` and `drafter`; DDTREE_BENCH_SGLANG_PYTHON names the interpreter that has SGLang.
A round is one of a batch. Returns 1 if the number of slots in use is not what it was before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pool_traffic
import probed
from trained_models import ModelPair


def main() -> int:
    """Send the traffic, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--page-size", default="1")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--budget", type=int, default=8)
    given = parser.parse_args()
    models = ModelPair(given.models / "target", given.models / "drafter")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "rounds.jsonl"
        options = ("--max-running-requests", str(given.clients), "--page-size", given.page_size)
        more = ("--speculative-ddtree-round-log", str(log))
        with probed.probed_server(models, given.budget, folder, options + more) as server:
            before = pool_traffic.used_slots(server)
            began = time.monotonic()
            traffic = pool_traffic.send(server, log, given.rounds, given.clients)
            seconds = time.monotonic() - began
            after = pool_traffic.used_slots(server)
            lines = pool_traffic.rounds(log)
            leaks = server.log().count("leak detected")
    sizes = Counter(line["sequences"] for line in lines)
    print(f"{len(lines)} rounds in {seconds:.0f} s, page size {given.page_size}; {traffic}")
    print("rounds by size of batch: " + ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items())))
    print(f"KV slots in use before {before}, after {after}; SGLang's own check found {leaks} leaks")
    return 0 if before == after and not leaks else 1


if __name__ == "__main__":
    sys.exit(main())
