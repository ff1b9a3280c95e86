"""The targets, one module a kind: `build()` gives the untrained model, FEATURE_LAYERS what the drafter sees of it."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from transformers import PreTrainedModel

from sglang_micro_models import identity


class Target(NamedTuple):
    """A model, and the layers (counted from 0) after which its hidden states go to the drafter.

    SGLang's DFLASH reads them before the next layer, so all but the last layer can be taken.
    """

    model: PreTrainedModel
    feature_layers: tuple[int, ...]


def build(kind: str) -> Target:
    """The untrained target of a kind; ValueError if there is no such kind."""
    identity.check(kind, identity.DEFAULT_BLOCK_SIZE)
    module = import_module(f"{__name__}.{kind}")
    return Target(module.build(), module.FEATURE_LAYERS)
