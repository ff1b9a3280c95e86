"""The training loss: cross-entropy through the draft head, its gradient worked out piece by piece on the way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 128  # logits of one piece stay in cache


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        total = torch.zeros(())
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            wanted, columns = probabilities[part], ids[part]
            mass = wanted.sum(-1, keepdim=True)
            logits = F.linear(hidden[part], head).float()
            chosen = logits.gather(1, columns)
            largest = logits.amax(-1, keepdim=True)
            exponentials = logits.sub_(largest).exp_()
            sums = exponentials.sum(-1, keepdim=True)
            total += (mass * (sums.log() + largest)).sum() - (wanted * chosen).sum()
            slope = exponentials.mul_(mass / sums).scatter_add_(1, columns, -wanted)
            gradient[part] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def head_loss(hidden: Tensor, head: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy of softmax(hidden head^T) against sparse targets; the head is not trained.

    `hidden` [R, dim], `head` [draft vocab, dim]; row r wants columns `ids` int64 [R, n] with `probabilities` [R, n],
    fp32, which may hold a weight of the row: a column may come twice, and a probability of 0 is ignored.
    """
    loss: Tensor = _HeadLoss.apply(hidden, head, ids, probabilities)  # type: ignore[no-untyped-call]
    return loss
