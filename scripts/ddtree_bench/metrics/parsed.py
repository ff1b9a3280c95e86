"""The raw rows of a cell, each worked out once for all of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pandas as pd

from ddtree_bench.load.requests_table import ADDED
from ddtree_bench.metrics.answers import Answer, answer
from ddtree_bench.metrics.speculation import NO_ROUND, NOTHING_TOLD, Details, details
from ddtree_bench.metrics.tokens import Row


@dataclass(frozen=True)
class Request:
    """A raw row, its answer (None unless its status is ok) and what the server says of its speculation."""

    row: Row
    answer: Answer | None
    details: Details


Requests: TypeAlias = pd.DataFrame | Sequence[Request]
"""The requests of a cell: raw rows (columns as in requests_table.SCHEMA), or what `parse` made of them."""


def parse(requests: Requests) -> Sequence[Request]:
    """Return the requests of a cell in the order of their rows; what is parsed already is returned as it is.

    Every function of metrics that takes requests takes them in either form: parse once to use several. Columns that
    older files lack (requests_table.ADDED) are taken as null.
    """
    if not isinstance(requests, pd.DataFrame):
        return requests
    absent = dict.fromkeys(name for name in ADDED if name not in requests)
    rows = ({**row, **absent} for row in requests.to_dict("records"))
    return _with_rounds([Request(row, answer(row), details(row)) for row in rows])


def _with_rounds(parsed: list[Request]) -> list[Request]:
    """Say that an answer of one token without details had no round, where the server tells of those of others.

    SGLang leaves the details out when no round was needed.
    """
    if not any(one.details.rounds for one in parsed):
        return parsed
    return [replace(one, details=NO_ROUND) if _over_with_the_prefill(one) else one for one in parsed]


def _over_with_the_prefill(one: Request) -> bool:
    return one.answer is not None and one.answer.tokens.total == 1 and one.details == NOTHING_TOLD
