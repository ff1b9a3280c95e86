"""What a saved target says in Hugging Face's float32: the oracle of tests, `python -m sglang_micro_models.reference`.

Prompts go in one by one and unpadded, so that neither a pad id nor its mask (transformers masks a real token whose id
is the pad id, unless it is told otherwise) can come between.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def greedy(model_dir: str | Path, prompts_ids: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """The `max_new_tokens` likeliest tokens after each prompt, one after another; the end token does not end them."""
    model = load(str(model_dir))
    return [_greedy(model, list(prompt), max_new_tokens) for prompt in prompts_ids]


@torch.inference_mode()
def next_distribution(
    model_dir: str | Path, prefixes_ids: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[list[float]]:
    """The law of the token after each prefix, [prefixes][vocabulary], softmax of the logits over `temperature` in fp64.

    Raises ValueError if `temperature` is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"--temperature {temperature}: must be above 0; at 0 there is one token, which `greedy` gives")
    model = load(str(model_dir))
    rows = []
    for prefix in prefixes_ids:
        logits = model(**_inputs(list(prefix)), use_cache=False).logits[0, -1]
        rows.append((logits.double() / temperature).softmax(-1).tolist())
    return rows


def chat_ids(model_dir: str | Path, questions: Sequence[str]) -> list[list[int]]:
    """Each question as the prompt that a server's chat route makes of it."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in questions
    ]


@lru_cache(maxsize=2)
def load(model_dir: str) -> PreTrainedModel:
    """The saved target in float32 on one thread."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(model(**_inputs(ids), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _inputs(ids: list[int]) -> dict[str, torch.Tensor]:
    row = torch.tensor([ids])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def main(argv: list[str] | None = None) -> int:
    """Read a JSON list of prompts (lists of ids) from standard input; write the answers as JSON to standard output."""
    parser = argparse.ArgumentParser(prog="python -m sglang_micro_models.reference", description=main.__doc__)
    parser.add_argument("what", choices=("greedy", "next", "chat"), help="tokens, laws, or ids of chat questions")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of greedy (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of next (default: %(default)s)")
    args = parser.parse_args(argv)
    given = json.load(sys.stdin)
    try:
        if args.what == "greedy":
            answer: object = greedy(args.model_dir, given, args.max_new_tokens)
        elif args.what == "next":
            answer = next_distribution(args.model_dir, given, args.temperature)
        else:
            answer = chat_ids(args.model_dir, given)
    except ValueError as error:
        print(f"sglang_micro_models.reference: {error}", file=sys.stderr)
        return 2
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
