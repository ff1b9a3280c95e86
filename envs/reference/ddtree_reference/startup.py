"""From a model's name to a running engine: find the weights, load them, choose the numerics by the self-test."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddtree_reference import decode, drafter, gguf, model, selftest, tokenizer, toy
from ddtree_reference.assets import ModelName, weight_files
from ddtree_reference.decode import Engine
from ddtree_reference.method import Method
from ddtree_reference.model import Numerics
from ddtree_reference.tokenizer import Tokenizer

NumericsChoice = Literal["auto", "mixed", "fp32"]

MAX_CONTEXT = 2048

log = logging.getLogger("ddtree_reference")


@dataclass(frozen=True)
class Opened:
    """A loaded engine with its tokenizer; `self_test` is the result for the numerics it runs in."""

    engine: Engine
    tokenizer: Tokenizer
    model_path: Path
    self_test: selftest.Result


def open_engine(
    name: ModelName,
    numerics: NumericsChoice,
    methods: Sequence[Method],
    sequences: int = 1,
    reuse_prefixes: bool = False,
    max_context: int = MAX_CONTEXT,
) -> Opened:
    """Load a model with memory for `sequences` at a time and for `methods`, and test it at the widths they verify.

    "auto" runs mixed numerics where the self-test passes and fp32 where it does not; "mixed" and "fp32" are taken as
    asked for, with a warning if the self-test fails.
    """
    memory = (sequences, reuse_prefixes, max_context)
    opened = _load(name, "fp32" if numerics == "fp32" else "mixed", methods, *memory)
    if opened.self_test.passed:
        return opened
    result = opened.self_test
    if numerics == "auto":
        log.warning(
            "self-test: %d of %d tree rows differ from rows computed alone in mixed numerics on this CPU; "
            "falling back to fp32, which is slower",
            result.differing,
            result.rows,
        )
        return _load(name, "fp32", methods, *memory)
    log.warning(
        "self-test: %d of %d tree rows differ in the last bits from rows computed alone", result.differing, result.rows
    )
    return opened


def _load(
    name: ModelName,
    numerics: Numerics,
    methods: Sequence[Method],
    sequences: int,
    reuse_prefixes: bool,
    max_context: int,
) -> Opened:
    max_width = max(method.verify_width for method in methods)
    files = weight_files(name)
    if name == "toy":
        target = toy.build_target(numerics, max_context)
        drafts, words = toy.build_drafter(target), toy.build_tokenizer()
    else:
        file = gguf.read(files["model"])
        target = model.from_gguf(file, numerics, max_context)
        drafts, words = drafter.load(files["drafter"], target), tokenizer.from_gguf(file.metadata)
    try:
        engine = decode.new_engine(target, drafts, max_width, sequences, reuse_prefixes)
    except RuntimeError as error:
        raise ValueError(f"--max-running-requests {sequences}: no memory for so many; lower it ({error})") from error
    result = selftest.run(target, methods, sequences)
    return Opened(engine, words, files["model"], result)
