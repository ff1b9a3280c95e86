"""Does the embedded engine leak? Many requests over HTTP, clients that go away at random, memory watched throughout.

    python tests/benchmarks/soak.py [--requests 1000] [--concurrency 32] [--rounds 51000] [--model toy]

51,000 rounds are an hour of SmolLM2 at 32 requests a round (70 ms a round); the toy goes through the same code faster.
Exits with 1 if a request was lost, a region did not come back, or memory grew.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_server import Server, end, launch

CANCELLED_SHARE = 0.3
TOKENS = (1000, 1900)
WARM_SHARE = 0.25  # of the requests, before memory is looked at
GROWTH_SHARE = 0.05  # of the memory after the warm-up: slots that no request had reached yet are still touched


def ask(url: str, seed: int) -> str:
    """Send one request and read its stream, or leave in the middle; says how it ended: whole, left or lost."""
    rng = random.Random(seed)
    tokens, leave = rng.randint(*TOKENS), rng.random() < CANCELLED_SHARE
    leave_after = rng.randrange(400) if leave else -1
    body = {
        "prompt": f"request {seed}",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": rng.choice([0.0, 1.0]),
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        return read(url, body, tokens, leave_after)
    except requests.RequestException:
        return "lost"


def read(url: str, body: dict[str, Any], tokens: int, leave_after: int) -> str:
    """Read a stream to its end, or leave after `leave_after` events if that is not negative."""
    usage, done, events = None, False, 0
    with requests.post(url + "/v1/completions", json=body, stream=True, timeout=600) as response:
        for line in response.iter_lines():
            if not line:
                continue
            events += 1
            if 0 <= leave_after < events:
                return "left"
            if line == b"data: [DONE]":
                done = True
            else:
                usage = json.loads(line[6:]).get("usage") or usage
    whole = done and usage is not None and usage["completion_tokens"] == tokens
    return "whole" if whole else "lost"


@contextmanager
def watched(process: psutil.Process, samples: list[tuple[float, float]]) -> Iterator[None]:
    """Within the block, (seconds, resident MB) of the process is appended once a second."""
    ended, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(1.0):
            samples.append((time.monotonic() - began, process.memory_info().rss / 1e6))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def counters(server: Server) -> dict[str, Any]:
    return dict(server.get("/server_info").json()["counters"])


def idle(server: Server) -> dict[str, Any]:
    """The counters once the engine has noticed that the last clients have gone."""
    for _ in range(100):
        now = counters(server)
        if not (now["running_requests"] or now["queued_requests"]):
            break
        time.sleep(0.1)
    return now


def progress(server: Server, done: int, samples: list[tuple[float, float]]) -> None:
    memory = f", {samples[-1][1]:.1f} MB" if samples else ""
    print(f"{done} requests, {counters(server)['rounds_total']} rounds{memory}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=51_000)
    parser.add_argument("--model", default="toy")
    options = parser.parse_args()

    arguments = ["--model", options.model, "--max-running-requests", str(options.concurrency)]
    arguments += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "4"]
    ends: Counter[str] = Counter()
    samples: list[tuple[float, float]] = []
    server = launch(Path(tempfile.mkdtemp()) / "log", *arguments)
    try:
        seeds = iter(range(10**9))
        with watched(psutil.Process(server.process.pid), samples), ThreadPoolExecutor(options.concurrency) as clients:
            while sum(ends.values()) < options.requests or counters(server)["rounds_total"] < options.rounds:
                wave = [next(seeds) for _ in range(4 * options.concurrency)]
                ends.update(clients.map(lambda seed: ask(server.url, seed), wave))
                progress(server, sum(ends.values()), samples)
        final = idle(server)
    finally:
        end(server)
    settled = [memory for at, memory in samples if at > WARM_SHARE * samples[-1][0]]
    growth = sum(settled[-10:]) / len(settled[-10:]) - sum(settled[:10]) / len(settled[:10])
    held = final["running_requests"] + final["queued_requests"] + options.concurrency - final["kv_regions_free"]
    print(f"{sum(ends.values())} requests ({dict(ends)}), {final['rounds_total']} rounds in {samples[-1][0]:.0f} s")
    print(
        f"memory {settled[0]:.0f} MB after the warm-up, {growth:+.1f} MB until the end, at most {max(settled):.0f} MB"
    )
    print(f"requests and regions held at the end: {held}; aborted by the engine: {final['aborted_requests_total']}")
    return int(ends["lost"] > 0 or held > 0 or growth > GROWTH_SHARE * settled[0])


if __name__ == "__main__":
    sys.exit(main())
