"""Training text: conversations in the toy language, as rows of token ids."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from sglang_micro_models import language, tokenizer

ROW_TOKENS = 160


def conversation(grammar: language.Grammar, source: random.Random) -> str:
    """One to three turns, each a question and an answer, as the chat template writes them."""
    turns = (
        f"{tokenizer.USER}{language.question(grammar, source)}{tokenizer.END}"
        f"{tokenizer.ASSISTANT}{language.answer(grammar, source)}{tokenizer.END}"
        for _ in range(source.randint(1, 3))
    )
    return tokenizer.BEGIN + "".join(turns)


def rows(seed: int, n_rows: int) -> Tensor:
    """int64 [n_rows, ROW_TOKENS]: each row a window of a conversation's ids, mostly from its beginning."""
    grammar, source, encoder = language.make_grammar(seed), random.Random(f"corpus {seed}"), tokenizer.build()
    out: list[list[int]] = []
    while len(out) < n_rows:
        ids = encoder(conversation(grammar, source))["input_ids"]
        while len(ids) < ROW_TOKENS:
            ids = ids + encoder(conversation(grammar, source))["input_ids"]
        start = 0 if source.random() < 0.7 else source.randint(0, len(ids) - ROW_TOKENS)
        out.append(ids[start : start + ROW_TOKENS])
    return torch.tensor(out)
