"""How a cell stands while it is measured, for the eye: results are counted from the whole streams afterwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_bench.load.connection import Flight
from ddtree_bench.load.reader import Reading

_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')


@dataclass(frozen=True)
class Live:
    """How a cell stands while it is measured.

    `tokens` is what was received so far: the last continuous usage of each answer, and where a server gives none the
    number of reads, in which case `tokens_exact` is False.
    """

    elapsed_s: float
    planned: int
    sent: int
    ended: int
    in_flight: int
    tokens: int
    tokens_exact: bool


class TokenCount:
    """Tokens received so far, for the eye: results count them from the whole stream."""

    def __init__(self) -> None:
        self._ended = 0
        self._tokens = 0
        self._exact = True

    def so_far(self, ended: Sequence[Flight], in_flight: Sequence[Reading]) -> tuple[int, bool]:
        """Return the tokens of the answers that ended and of those in flight, and whether all are the server's counts.

        `ended` are all that ended so far, in an order that only grows.
        """
        for one in ended[self._ended :]:
            if one.reading:
                self._add(*_tokens(one.reading))
        self._ended = len(ended)
        counts = [_tokens(reading) for reading in in_flight]
        return self._tokens + sum(n for n, _ in counts), self._exact and all(exact for _, exact in counts)

    def _add(self, tokens: int, exact: bool) -> None:
        self._tokens += tokens
        self._exact &= exact


def _tokens(reading: Reading) -> tuple[int, bool]:
    if found := _TOKENS.findall(b"".join(reading.recent)):
        return int(found[-1]), True
    return len(reading.reads), not reading.reads
