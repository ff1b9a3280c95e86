"""What the metrics of a large cell cost: from the stored stamps of 10,000 requests of 500 events to metrics.json.

Makes such a requests.parquet, reads and computes everything in a process of its own, and prints the seconds and the
most memory that it took. Exits with 1 above MOST_S or MOST_MIB.

    python tests/benchmarks/metrics_speed.py [--requests 10000] [--events 500]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MOST_S = 20.0
MOST_MIB = 2048.0

CONCURRENCY = 64
BATCH = 250


def main() -> int:
    arguments = _arguments()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.parquet"
        make(path, arguments.requests, arguments.events)
        print(f"{arguments.requests} requests x {arguments.events} events, {path.stat().st_size / 2**20:.0f} MiB")
        found = json.loads(subprocess.check_output([sys.executable, __file__, "--measure", str(path)]))
    for step, seconds in found["steps"].items():
        print(f"  {step:16} {seconds:6.2f} s")
    print(f"{found['seconds']:.1f} s (at most {MOST_S:g}), {found['mib']:.0f} MiB (at most {MOST_MIB:g})")
    return int(found["seconds"] > MOST_S or found["mib"] > MOST_MIB)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(path: Path) -> dict[str, Any]:
    """Read and compute everything; return the seconds of each step, their sum with the imports, and the peak."""
    begun = time.perf_counter()
    from ddtree_bench import metrics
    from ddtree_bench.load import requests_table, server_samples
    from ddtree_bench.plan import Load

    steps = {"imports": time.perf_counter() - begun}

    def timed(step: str, function: Any, *arguments: Any, **more: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **more)
        steps[step] = time.perf_counter() - start
        return result

    load, slos = Load(CONCURRENCY), metrics.Slos(ttft_s=0.5, tpot_s=0.05)
    requests = timed("read", requests_table.read, path)
    parsed = timed("parse", metrics.parse, requests)
    timed("request_metrics", metrics.request_metrics, parsed)
    timed("cell_metrics", metrics.cell_metrics, parsed, load, "DDTREE", slos)
    samples, planned = server_samples.frame([]), len(requests)
    client = {"wall_s": 1.0, "reader_wait_s": 0.0}
    further = {"method": "DDTREE", "slos": slos, "parsed": parsed}
    found = timed("document", metrics.document, requests, load, client, samples, None, planned, None, **further)
    assert found["status"] == "ok"
    assert found["output_tokens"] == int(requests["completion_tokens"].sum())
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"steps": steps, "seconds": time.perf_counter() - begun, "mib": mib}


def make(path: Path, requests: int, events: int) -> None:
    """Write raw rows of a closed loop of CONCURRENCY users; every fourth answer comes without continuous usage."""
    from ddtree_bench.load.requests_table import SCHEMA

    clock = np.random.default_rng(1)
    free = np.zeros(CONCURRENCY)
    words = np.array([f" word{n}" for n in range(30_000)], dtype=object)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for start in range(0, requests, BATCH):
            numbers = range(start, min(start + BATCH, requests))
            rows = list(_rows(numbers, events, free, words, clock))
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


def _rows(
    numbers: range, events: int, free: np.ndarray, words: np.ndarray, clock: np.random.Generator
) -> Iterator[dict[str, Any]]:
    for index in numbers:
        worker = int(np.argmin(free))
        accepted = np.minimum(clock.geometric(0.35, events - 1) - 1, 7)
        so_far = np.cumsum([1, *(accepted + 1)])
        gaps = 0.03 * np.exp(clock.normal(0, 0.1, events - 1))
        t_send = 1000.0 + free[worker]
        times = t_send + 0.2 * np.exp(clock.normal(0, 0.3)) + np.cumsum([0.0, *gaps])
        free[worker] = times[-1] + 0.002 - 1000.0
        texts = words[clock.integers(0, len(words), events)]
        yield _row(index, worker, t_send, times, so_far, accepted, texts.tolist(), clock)


def _row(
    index: int,
    worker: int,
    t_send: float,
    times: np.ndarray,
    so_far: np.ndarray,
    accepted: np.ndarray,
    texts: list[str],
    clock: np.random.Generator,
) -> dict[str, Any]:
    events, tokens, last = len(times), int(so_far[-1]), float(times[-1])
    spec = {
        "spec_verify_ct": events - 1,
        "spec_num_correct_drafts": int(accepted.sum()),
        "spec_num_proposed_drafts": 16 * (events - 1),
        "spec_correct_drafts_histogram": np.bincount(accepted).tolist(),
    }
    return {
        "index": index,
        "prompt_id": f"p{index}",
        "category": "code",
        "prompt_sha256": f"{index:064x}",
        "worker": worker,
        "max_tokens": tokens,
        "t_send": t_send,
        "t_sent": t_send + 3e-5,
        "t_end": last + 0.001,
        "retries": 0,
        "event_times": [float(times[0]) - 0.001, *times.tolist(), last + 0.0005, last + 0.0005],
        "event_lags": clock.exponential(1e-4, events + 3).tolist(),
        "event_kinds": ["role", *["token"] * events, "usage", "done"],
        "event_texts": ["", *texts, "", ""],
        "event_tokens": [None, *(so_far.tolist() if index % 4 else [None] * events), tokens, None],
        "event_finish": [False] * events + [True, False, False],
        "http_status": 200,
        "status": "ok",
        "finish_reason": "length",
        "prompt_tokens": 200,
        "completion_tokens": tokens,
        "cached_prompt_tokens": 0,
        "spec": json.dumps(spec),
        "text": "".join(texts),
    }


if __name__ == "__main__":
    sys.exit(main())
