"""Failures on request, for tests of what a client and a pipeline do when a server fails."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Literal

from ddtree_reference.method import Method

VARIABLE = "DDTREE_REFERENCE_FAULT"
ROUNDS = 2  # rounds that are sent before an injected crash or exception

log = logging.getLogger("ddtree_reference")


@dataclass(frozen=True)
class Fault:
    """What tests ask for: no start, or an answer to a prompt with `text` in it that crashes or raises."""

    kind: Literal["start", "prompt", "raise"]
    text: str = ""

    def strike(self, prompt: str) -> None:
        """Raise, or die as a crashing server would, if the fault is meant for this prompt."""
        if self.kind == "start" or self.text not in prompt:
            return
        message = f"{VARIABLE}: {self.kind} on a prompt that contains {self.text!r}"
        if self.kind == "raise":
            raise RuntimeError(message)
        log.error(message)
        time.sleep(0.2)  # the first tokens are on their way to the client
        os._exit(3)


def parse(value: str | None, method: Method) -> Fault | None:
    """The fault that a value like `DDTREE:8@start` or `DFLASH@prompt=haiku` asks of this method, if any.

    `start` ends the server at once, `prompt=TEXT` in the middle of an answer to a prompt that contains TEXT;
    `raise=TEXT` raises an exception there. Raises ValueError if the value has another form.
    """
    if not value:
        return None
    where, _, what = value.partition("@")
    algorithm, _, budget = where.partition(":")
    kind, equals, text = what.partition("=")
    faults: dict[tuple[str, str], Fault] = {
        ("start", ""): Fault("start"),
        ("prompt", "="): Fault("prompt", text),
        ("raise", "="): Fault("raise", text),
    }
    fault = faults.get((kind, equals))
    if fault is None or algorithm not in ("AR", "DFLASH", "DDTREE"):
        raise ValueError(f"{VARIABLE}={value!r}: use METHOD[:BUDGET]@start, ...@prompt=TEXT or ...@raise=TEXT")
    if algorithm != method.algorithm or (budget and budget != str(method.budget)):
        return None
    return fault
