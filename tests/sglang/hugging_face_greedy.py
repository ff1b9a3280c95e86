"""Greedy tokens by Hugging Face in float32, run by the SGLang environment's interpreter as a script.

Reads `{"model": folder, "prompts": [[id, ...], ...], "tokens": count}` from stdin, and writes the list of the lists of
new ids. The ids are found by argmax over whole sequences without a cache or padding: nothing that could mask an id.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def greedy(python: Path, model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """`tokens` greedy ids after each prompt, end-of-text ids not stopping them."""
    request = json.dumps({"model": str(model), "prompts": prompts, "tokens": tokens})
    done = subprocess.run([python, __file__], input=request, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    answer: list[list[int]] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Answer one request."""
    import torch
    from transformers import AutoModelForCausalLM

    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for prompt in request["prompts"]:
            ids = torch.tensor([prompt])
            for _ in range(request["tokens"]):
                logits = model(input_ids=ids, use_cache=False).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
            answers.append(ids[0, len(prompt) :].tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
