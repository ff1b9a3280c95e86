"""How many tokens a round would commit, worked out along a text the target wrote itself.

A verified token is the target's own token, greedy or drawn, so a round commits the longest draft that agrees with the
text, and one token more.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from sglang_micro_models import training


@torch.no_grad()
def write(
    pair: training.Pair, prompts: list[list[int]], n_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """The target's own continuations of `prompts`, `n_tokens` each, prompts included; at temperature 0 greedy."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(n_tokens):
            logits = pair.target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            if temperature == 0:
                ids.append(int(logits.argmax()))
            else:
                ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        texts.append(ids)
    return texts


@torch.no_grad()
def tokens_per_round(pair: training.Pair, text: list[int], n_prompt: int, budget: int | None) -> list[int]:
    """Tokens that each round commits along `text` after its first `n_prompt` tokens, the last round's cut left out.

    `budget` None is the chain of the likeliest drafts, else the tree of that many nodes.
    """
    block = pair.drafter.config.block_size
    row = torch.tensor([text])
    seen = training.features(pair.target, row)
    committed, at = [], n_prompt  # text[at] is the last token that is final and was not forwarded
    while at + block <= len(text):
        anchors = torch.tensor([[at]])
        logits = training.draft_logits(pair.drafter, pair.target, seen, anchors, row[:, at : at + 1])[0, 0]
        accepted = _chain(logits, text[at + 1 :]) if budget is None else _tree(logits, text[at + 1 :], budget)
        committed.append(accepted + 1)
        at += accepted + 1
    return committed


def _chain(logits: Tensor, wanted: list[int]) -> int:
    drafts = logits.argmax(-1).tolist()
    return next((i for i, (a, b) in enumerate(zip(drafts, wanted, strict=False)) if a != b), len(drafts))


def _tree(logits: Tensor, wanted: list[int], budget: int) -> int:
    """Depth to which the `budget` likeliest prefixes of the drafts' product law hold the wanted text."""
    top = logits.log_softmax(-1).topk(min(budget, logits.shape[-1]))
    scores, ids = top.values.tolist(), top.indices.tolist()
    heap: list[tuple[float, tuple[int, ...]]] = [(-scores[0][0], (0,))]
    reached = 0
    for _ in range(budget):
        if not heap:
            break
        cost, ranks = heapq.heappop(heap)
        depth = len(ranks)
        if [ids[d][r] for d, r in enumerate(ranks)] == wanted[:depth]:
            reached = max(reached, depth)
        if ranks[-1] + 1 < len(ids[0]):
            sibling = scores[depth - 1][ranks[-1] + 1] - scores[depth - 1][ranks[-1]]
            heapq.heappush(heap, (cost - sibling, (*ranks[:-1], ranks[-1] + 1)))
        if depth < len(ids):
            heapq.heappush(heap, (cost - scores[depth][0], (*ranks, 0)))
    return reached
