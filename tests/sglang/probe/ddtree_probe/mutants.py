"""Walks that change the law of a text, for tests that have to find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Mutant = Callable[[Any, Tensor], Tensor]
"""From what is verified and the target's tokens [batch, width] to the tokens that the walk gets."""


def prefers_drafts(verify_input: Any, chosen: Tensor) -> Tensor:
    """Behind a node with children, in one case of five, the best draft in the place of the target's token."""
    child = verify_input.retrieve_next_token.view(chosen.shape).long()
    drafts = verify_input.draft_token.view(chosen.shape).gather(1, child.clamp(min=0)).to(chosen.dtype)
    return torch.where((child >= 0) & (torch.rand(chosen.shape) < 0.2), drafts, chosen)


def siblings_row(verify_input: Any, chosen: Tensor) -> Tensor:
    """Each node that has a next sibling continues with the token that the target took after that sibling."""
    sibling = verify_input.retrieve_next_sibling.view(chosen.shape).long()
    own = torch.arange(chosen.shape[1]).expand_as(sibling)
    return chosen.gather(1, torch.where(sibling >= 0, sibling, own))


MUTANTS: dict[str, Mutant] = {"prefers_drafts": prefers_drafts, "siblings_row": siblings_row}
