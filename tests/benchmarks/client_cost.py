"""What the client costs: CPU per event beside clients that only read and stamp, interleaved in one run.

    python tests/benchmarks/client_cost.py [--concurrency 256] [--pairs 5] [--requests-per-user 2]

The server is a process of its own and no part of the CPU time. Three readers that are nothing but readers stand beside
the client: one thread with epoll that stamps and throws away, the same that also keeps the bytes and the kernel's
stamps, and a thread for each connection that stamps. Prints the CPU time per event of each and the client's ratio to
each with its spread over the pairs; exits with 1 when the median ratio to the first is above 1.3. The users' events are
spread over the whole interval (the stagger does not divide it), or all readers would find many at once.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable

from bare_readers import read_with_epoll, read_with_threads

from ddtree_bench.load.bodies import PATHS, request_body
from ddtree_bench.load.calibration.process import ServerProcess, calibration_server
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.load.calibration.trial import calibrate, prompts, workload
from ddtree_bench.load.wire import request_bytes

BAR = 1.3
OURS, EPOLL, RECORDING, THREADS = "the client", "bare, epoll", "bare, epoll, recording", "bare, a thread each"


def texts(server: ServerProcess, users: int, requests_per_user: int) -> list[list[bytes]]:
    """The very requests of the client, by user."""
    asked = prompts(users * requests_per_user)
    work, url = workload(len(asked), server.schedule), server.url + PATHS["chat"]
    sent = [request_bytes(url, request_body(work, prompt, "calibration"), {}) for prompt in asked]
    return [sent[user::users] for user in range(users)]


def sides(server: ServerProcess, users: int, each: int, stagger_s: float) -> dict[str, Callable[[], float]]:
    """The clients to compare: functions that return the CPU seconds of their process for one run."""
    requests = texts(server, users, each)
    return {
        OURS: lambda: float(calibrate(server, users, each, stagger_s).measurement.client["cpu_s"] or 0.0),
        EPOLL: lambda: read_with_epoll(server.url, requests, stagger_s),
        RECORDING: lambda: read_with_epoll(server.url, requests, stagger_s, record=True),
        THREADS: lambda: read_with_threads(server.url, requests, stagger_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--stagger-ms", type=float, default=8.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    order, schedule = random.Random(options.seed), Schedule(events=options.events)
    events = options.concurrency * options.requests_per_user * options.events
    costs: list[dict[str, float]] = []
    with calibration_server(schedule) as server:
        runs = sides(server, options.concurrency, options.requests_per_user, options.stagger_ms / 1e3)
        for _ in range(options.pairs):
            cost = {}
            for name in order.sample(list(runs), len(runs)):
                gc.collect()
                cost[name] = runs[name]() / events * 1e6
            costs.append(cost)
            print("  ".join(f"{name}: {cost[name]:.1f} us/event" for name in runs), flush=True)
    for name in (EPOLL, RECORDING, THREADS):
        ratios = [cost[OURS] / cost[name] for cost in costs]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"the client over {name}: {statistics.median(ratios):.2f} (median of {len(ratios)}, {spread})")
    return 0 if statistics.median(cost[OURS] / cost[EPOLL] for cost in costs) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
