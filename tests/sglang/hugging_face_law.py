"""The exact law of an answer's first tokens at temperature 1, by Hugging Face in float32; run with its interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENS = 4
RARE = 1e-7
"""Beginnings less probable than this are not followed: an outcome misses at most RARE for each of the first tokens."""
ROWS = 256

Law = dict[tuple[int, ...], float]


def joint_law(python: Path, model: Path, prompt: Sequence[int]) -> Law:
    """The joint law of tokens 2 to TOKENS after a prompt, summed over the first one; rare outcomes are left out."""
    request = json.dumps({"model": str(model), "prompt": prompt})
    done = subprocess.run([python, __file__], input=request, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    return {tuple(path): p for path, p in json.loads(done.stdout)}


def next_tokens(model: Any, beginnings: Sequence[tuple[int, ...]]) -> Any:
    """Probabilities [beginnings, vocabulary], float64, of the token after each of several beginnings of one length."""
    import torch

    parts = []
    for start in range(0, len(beginnings), ROWS):
        ids = torch.tensor(beginnings[start : start + ROWS])
        parts.append(model(input_ids=ids, use_cache=False).logits[:, -1].double().softmax(-1))
    return torch.cat(parts)


def main() -> None:
    """Answer one request."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # more only wait for each other with models this small
    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    prompt = tuple(request["prompt"])
    paths: Law = {(): 1.0}
    with torch.inference_mode():
        for _ in range(TOKENS):
            followed: Law = {}
            odds = next_tokens(model, [(*prompt, *path) for path in paths])
            for (path, p), row in zip(paths.items(), odds.tolist(), strict=True):
                followed.update(((*path, token), p * q) for token, q in enumerate(row) if p * q > RARE)
            paths = followed
    law: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for path, p in paths.items():
        law[path[1:]] += p
    json.dump(list(law.items()), sys.stdout)


if __name__ == "__main__":
    main()
