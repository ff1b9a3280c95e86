"""How exact the client is: TTFT 100 ms, then events 20 ms apart, at several concurrencies, against the server's stamps.

    python tests/benchmarks/client_accuracy.py [--concurrency 1 64 128 256] [--repeats 3]

Prints a row a run; exits with 1 when an error is above its limit: TTFT mean 1.5 ms, ITL mean 0.1 ms, throughput 1 %.
"""

from __future__ import annotations

import argparse
import random
import sys

from rich.console import Console

from ddtree_bench.load.calibration.process import calibration_server
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.load.calibration.trial import calibrate
from ddtree_bench.measuring.calibrate_command import WIDTH, table, within_limits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--stagger-ms", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    order, trials = random.Random(options.seed), []
    with calibration_server(Schedule(events=options.events)) as server:
        for _ in range(options.repeats):
            for concurrency in order.sample(options.concurrency, len(options.concurrency)):
                trials.append(calibrate(server, concurrency, options.requests_per_user, options.stagger_ms / 1e3))
    trials.sort(key=lambda trial: trial.concurrency)
    Console(width=WIDTH).print(table(trials))
    within = sum(within_limits(trial) for trial in trials)
    print(f"{within} of {len(trials)} runs within the limits")
    return 0 if within == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
