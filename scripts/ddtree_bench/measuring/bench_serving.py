"""SGLang's own load client, bench_serving: what it is asked to do, and what it says came out.

Read in release 0.5.23. It differs from ours in what it calls by the same name; `second_opinion` holds both together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_bench.load.bodies import request_body
from ddtree_bench.measuring.measure_options import Asked, UsageError
from ddtree_bench.measuring.measured_folder import FolderError
from ddtree_bench.targets import commands

MODULE = "sglang.benchmark.serving"
BACKENDS = {"chat": "sglang-oai-chat", "completions": "sglang-oai"}
DATASETS = {"chat": "openai", "completions": "custom"}
"""By endpoint. `openai` keeps the order of the prompts, `custom` shuffles them."""

FILLING = "x" * 64
"""Stands for the answer that a conversation of `custom` must have; its length is overruled."""

DATASET, RESULT, LOG = "dataset.jsonl", "result.jsonl", "log.txt"
LONGEST_S = 7200.0
KEY_VARIABLES = ("OPENAI_API_KEY", "API_KEY")
"""Environment variables whose content it sends to the server, the first as a bearer token."""

NOT_SENT = ("model", "prompt", "messages", "max_tokens", "stream", "return_spec_tokens_details")
"""Fields of our requests that it sets itself, or whose answer breaks it: an event without choices."""


class OpinionFailed(RuntimeError):
    """bench_serving could not be run or gave no result; the message has what it said."""


@dataclass(frozen=True)
class Result:
    """What bench_serving says: times in seconds, `itl_s` the mean gap between events, `duration_s` the whole run's."""

    completed: int
    output_tokens: int
    duration_s: float
    throughput_tok_s: float
    peak_tok_s: float
    ttft_s: float
    tpot_s: float
    itl_s: float
    e2e_s: float


def run(python: str, what: Asked, folder: Path, env: Mapping[str, str]) -> Result:
    """Put the load of `what` on its server with the bench_serving of an environment; `folder` gets its files.

    `python` is the environment's. Raises UsageError as `check`, FolderError when the folder holds a result already,
    OpinionFailed for a failure.
    """
    tokenizer = check(what)
    if (folder / RESULT).exists():
        raise FolderError(f"{folder / RESULT}: exists, and nothing measured is overwritten; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATASET).write_text("".join(f"{json.dumps(line)}\n" for line in dataset(what)), encoding="utf-8")
    done = commands.run(
        arguments(python, what, tokenizer, folder), timeout_s=LONGEST_S, env=with_key(env, what.headers)
    )
    (folder / LOG).write_text(f"{done.stdout}\n{done.stderr}", encoding="utf-8")
    if done.exit_code != 0 or not (folder / RESULT).exists():
        said = done.stderr.strip().splitlines()[-3:]
        raise OpinionFailed(f"{MODULE} ended with {done.exit_code}: {' / '.join(said)}; all of it: {folder / LOG}")
    return read(folder / RESULT)


def check(what: Asked) -> Path:
    """Return the tokenizer that a load is counted with. Raises UsageError for a load that it does not know."""
    if what.load.rate is not None:
        raise UsageError("--rate: the two clients are compared under a fixed concurrency only; give --concurrency")
    if what.tokenizer is None:
        raise UsageError("--tokenizer: is missing, and bench_serving counts with it; give the model's folder")
    return what.tokenizer


def with_key(env: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the key of `headers` where bench_serving reads it, and with no key of anything else."""
    kept = {name: value for name, value in env.items() if name not in KEY_VARIABLES}
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return {**kept, KEY_VARIABLES[0]: key} if scheme == "Bearer" and key else kept


def arguments(python: str, what: Asked, tokenizer: Path, folder: Path) -> list[str]:
    """The command line for the load of `what`: same prompts, lengths, sampling and concurrency, an empty cache."""
    endpoint = what.workload.endpoint
    words: dict[str, Any] = {
        "backend": BACKENDS[endpoint],
        "base-url": what.url,
        "model": what.model,
        "served-model-name": what.model,
        "tokenizer": tokenizer,
        "dataset-name": DATASETS[endpoint],
        "dataset-path": folder / DATASET,
        "num-prompts": len(what.prompts),
        "sharegpt-output-len": what.workload.max_tokens,
        "max-concurrency": what.load.concurrency,
        "seed": what.seed,
        "extra-request-body": json.dumps(extra_body(what)),
        "output-file": folder / RESULT,
    }
    named = [part for name, value in words.items() for part in (f"--{name}", str(value))]
    return [python, "-m", MODULE, *named, "--output-details", "--disable-tqdm", "--flush-cache"]


def extra_body(what: Asked) -> dict[str, Any]:
    """What our requests say beside the prompt and its length; usage comes with every event, and not after them."""
    sent = request_body(what.workload, what.prompts[0], what.model)
    kept = {name: value for name, value in sent.items() if name not in (*NOT_SENT, *what.omit)}
    return {**kept, "stream_options": {"include_usage": False, "continuous_usage_stats": True}}


def dataset(what: Asked) -> list[dict[str, Any]]:
    """The prompts as lines of its dataset."""
    if what.workload.endpoint == "chat":
        messages = (list(prompt.messages or [{"role": "user", "content": prompt.text}]) for prompt in what.prompts)
        return [{"messages": one, "max_tokens": what.workload.max_tokens} for one in messages]
    return [{"conversations": [{"content": prompt.text}, {"content": FILLING}]} for prompt in what.prompts]


def read(path: Path) -> Result:
    """Read the last line of a result file. Raises OpinionFailed for one without the values of a Result."""
    try:
        found = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        return Result(
            completed=found["completed"],
            output_tokens=found["total_output_tokens"],
            duration_s=found["duration"],
            throughput_tok_s=found["output_throughput"],
            peak_tok_s=found["max_output_tokens_per_s"],
            ttft_s=found["mean_ttft_ms"] / 1e3,
            tpot_s=found["mean_tpot_ms"] / 1e3,
            itl_s=_mean_gap(found["itls"]),
            e2e_s=found["mean_e2e_latency_ms"] / 1e3,
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise OpinionFailed(f"{path}: is no result of {MODULE} ({error!r})") from error


def _mean_gap(gaps: Sequence[Sequence[float]]) -> float:
    """Of the gaps as they were: its own mean divides them by tokens once the server tells an accept length."""
    every = [gap for one in gaps for gap in one]
    return sum(every) / len(every) if every else float("nan")
