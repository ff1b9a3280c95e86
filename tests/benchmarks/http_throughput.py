"""What HTTP costs: the same requests through the embedded server and in a bare loop in this process, interleaved.

    python tests/benchmarks/http_throughput.py [--model smollm2] [--repeats 10] [--tokens 64]

Prints the ratio of tokens per second, HTTP over bare, for AR and for DDTREE, with its spread over the repeats; exits
with 1 when a median is below 0.95.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import requests
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_server import chat_ids, end, launch

from ddtree_reference import decode, lossless, startup
from ddtree_reference.method import Method
from ddtree_reference.sequence import Request

PROMPTS = Path(__file__).parents[2] / "config" / "prompts" / "heldout.jsonl"
BUDGET = 8
PROMPTS_USED = 4
BAR = 0.95


def bare(opened: startup.Opened, method: Method, prompts: list[str], tokens: int) -> float:
    """Tokens per second of the prompts, one after another, prefill included."""
    began, done = time.perf_counter(), 0
    for prompt in prompts:
        request = Request(tuple(chat_ids(opened, prompt)), tokens)
        done += sum(len(step.tokens) for step in decode.generate(opened.engine, method, request))
    return done / (time.perf_counter() - began)


def through_http(session: requests.Session, url: str, prompts: list[str], tokens: int) -> float:
    """Tokens per second of the prompts, streamed one after another."""
    began, done = time.perf_counter(), 0
    for prompt in prompts:
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with session.post(url + "/v1/chat/completions", json=body, stream=True, timeout=600) as response:
            lines = [line for line in response.iter_lines(chunk_size=None) if line.startswith(b"data: {")]
        done += json.loads(lines[-1][6:])["usage"]["completion_tokens"]
    return done / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=["smollm2", "toy"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()

    torch.set_num_threads(1)
    prompts = [entry["prompt"] for entry in lossless.read_prompts(PROMPTS)[:PROMPTS_USED]]
    methods = {"AR": Method("AR"), "DDTREE": Method("DDTREE", budget=BUDGET)}
    flags = {
        "AR": (),
        "DDTREE": ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(BUDGET)),
    }
    opened = startup.open_engine(options.model, "auto", list(methods.values()))
    enough = True
    for name, method in methods.items():
        server = launch(Path(tempfile.mkdtemp()) / "log", "--model", options.model, *flags[name])
        ratios = []
        try:
            with requests.Session() as session:
                for repeat in range(-1, options.repeats):
                    rates: dict[str, float] = {}
                    for side in ("http", "bare") if repeat % 2 else ("bare", "http"):
                        if side == "http":
                            rates[side] = through_http(session, server.url, prompts, options.tokens)
                        else:
                            rates[side] = bare(opened, method, prompts, options.tokens)
                    if repeat >= 0:  # the first is a warm-up
                        ratios.append(rates["http"] / rates["bare"])
        finally:
            end(server)
        low, high = min(ratios), max(ratios)
        print(
            f"{name}: HTTP over bare {statistics.median(ratios):.3f} (median of {len(ratios)}, {low:.3f} to {high:.3f})"
        )
        enough = enough and statistics.median(ratios) >= BAR
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
