"""What the checks of a cell look at, and what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ddtree_bench.metrics.cells import Scalars
from ddtree_bench.metrics.tokens import Row
from ddtree_bench.plan import Load

Verdict = tuple[bool | None, str]
"""Whether a check holds (None: it cannot be judged), and what that rests on."""


@dataclass(frozen=True)
class Check:
    """A check by name: whether it holds (None: it cannot be judged) and what it rests on, or why it cannot."""

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class Checked:
    """What the checks look at.

    `rows` are the raw rows of the cell, `cell` its metrics, `samples` those of the server's load, `counters` the
    differences of the server's counters over the cell by name, `missing` why others are not there, `planned` the
    number of requests that were to be sent, and `notes` what is to be known of what the server tells.
    """

    rows: Sequence[Row]
    cell: Scalars
    load: Load
    method: str | None
    samples: pd.DataFrame
    counters: Mapping[str, float]
    missing: Mapping[str, str]
    planned: int
    notes: Sequence[str] = ()
