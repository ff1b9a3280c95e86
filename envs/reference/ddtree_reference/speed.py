"""How fast the engine decodes, beside what the machine's memory allows.

A round reads every weight once, whatever the batch: the bytes of the weights over the machine's read bandwidth bound
the time of a round from below. The bandwidth is measured in the same run, with as many threads as the engine uses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ddtree_reference import lossless, startup, tokenizer
from ddtree_reference.decode import Engine
from ddtree_reference.method import Method
from ddtree_reference.model import Target
from ddtree_reference.scheduler import Scheduler
from ddtree_reference.sequence import Request

BUFFER_BYTES = 512 * 2**20  # far beyond any cache
READS = 5


@dataclass(frozen=True)
class Speed:
    """What one configuration did at one concurrency in one repeat. `tokens` and `rounds` leave out prefill."""

    configuration: str
    concurrency: int
    repeat: int
    tokens: int
    rounds: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all sequences together."""
        return self.tokens / self.seconds

    @property
    def rounds_per_second(self) -> float:
        """Batched target forwards: how often the weights were read."""
        return self.rounds / self.seconds


def read_bandwidth() -> float:
    """Bytes a second that this process's threads can read from memory: the best of several passes over a buffer."""
    buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.int32)
    best = 0.0
    for _ in range(READS):
        began = time.perf_counter()
        buffer.amax()
        best = max(best, BUFFER_BYTES / (time.perf_counter() - began))
    return best


def weight_bytes(target: Target) -> int:
    """Bytes of the weights that a forward reads: all layers and the head."""
    config = target.config
    attention = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim * config.dim
    weights = config.n_layers * (attention + 3 * config.hidden_dim * config.dim) + config.vocab_size * config.dim
    return weights * target.embedding.element_size()


def measure(engine: Engine, method: Method, requests: Sequence[Request], concurrency: int, repeat: int) -> Speed:
    """Decode `requests`, `concurrency` at a time, all of a group begun before the clock starts.

    Requests come in groups of `concurrency` that run to their ends together, so that every round has the full batch:
    they must not end early (no eos, equal max_tokens).
    """
    tokens = rounds = 0
    seconds = 0.0
    scheduler: Scheduler[int] = Scheduler(engine, method)
    for start in range(0, len(requests) - concurrency + 1, concurrency):
        for key, request in enumerate(requests[start : start + concurrency]):
            scheduler.add(key, request)
        joined = 0
        while joined < concurrency:
            joined += len(scheduler.prefill())
        while scheduler.running == concurrency:
            began = time.perf_counter()
            advances, _ = scheduler.decode()
            seconds += time.perf_counter() - began
            tokens += sum(len(advance.round.tokens) for advance in advances)
            rounds += 1
        for key in range(concurrency):
            scheduler.drop(key)
    return Speed(lossless.name_of(method), concurrency, repeat, tokens, rounds, seconds)


def main(options: argparse.Namespace) -> int:
    """Measure as the command line asks, all configurations in every repeat, and print a table."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: at least 2, the first comes with the prompt")
    entries = lossless.read_prompts(options.prompts)
    if max(options.concurrency) > len(entries):
        raise ValueError(
            f"--concurrency {max(options.concurrency)}: {options.prompts} has {len(entries)} prompts; "
            "lower it or name a file with more"
        )
    torch.set_num_threads(options.threads)
    methods = [Method("AR") if text == "AR" else lossless.parse_method(text) for text in options.configs]
    opened = startup.open_engine(options.model, options.numerics, methods, max(options.concurrency))
    texts = [
        tokenizer.render_chat(opened.tokenizer, [{"role": "user", "content": entry["prompt"]}]) for entry in entries
    ]
    requests = [Request(tuple(tokenizer.encode(opened.tokenizer, text)), options.tokens) for text in texts]
    bandwidths, speeds = [], []
    for repeat in range(options.repeats):
        bandwidths.append(read_bandwidth())
        for concurrency in options.concurrency:
            for method in methods:
                wanted = requests[: max(options.limit, concurrency) // concurrency * concurrency]
                speeds.append(measure(opened.engine, method, wanted, concurrency, repeat))
        print(f"repeat {repeat + 1} of {options.repeats}", file=sys.stderr)
    _print(opened.engine.target, bandwidths, speeds)
    if options.output:
        result = {
            "weight_bytes": weight_bytes(opened.engine.target),
            "bytes_per_second": bandwidths,
            "numerics": opened.engine.target.numerics,
            "threads": options.threads,
            "speeds": [asdict(speed) for speed in speeds],
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _print(target: Target, bandwidths: Sequence[float], speeds: Sequence[Speed]) -> None:
    size, limit = weight_bytes(target), statistics.median(bandwidths)
    print(f"weights {size / 1e6:.0f} MB a round, memory read at {limit / 1e9:.1f} GB/s, medians of the repeats")
    print(f"{'configuration':<16}{'C':>4}{'tok/s':>9}{'ms/round':>10}{'tok/round':>11}{'GB/s':>7}{'of limit':>10}")
    for configuration, concurrency in dict.fromkeys((speed.configuration, speed.concurrency) for speed in speeds):
        own = [s for s in speeds if (s.configuration, s.concurrency) == (configuration, concurrency)]
        rate = statistics.median(speed.tokens_per_second for speed in own)
        rounds = statistics.median(speed.rounds_per_second for speed in own)
        print(
            f"{configuration:<16}{concurrency:>4}{rate:>9.1f}{1e3 / rounds:>10.2f}{rate / rounds / concurrency:>11.2f}"
            f"{rounds * size / 1e9:>7.1f}{rounds * size / limit:>10.2f}"
        )
