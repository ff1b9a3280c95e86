"""Prometheus text: its series by name, and what several ranks' series of one name come to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank", "moe_dp_rank", "attn_cp_rank")
"""Labels of processes that do the same requests together: each counts all of them."""

_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Series:
    """One line: its labels and its value."""

    labels: Mapping[str, str]
    value: float


def parse(text: str) -> dict[str, list[Series]]:
    """Return the series of a Prometheus text by the name that stands on their lines. Raises ValueError."""
    found: dict[str, list[Series]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(Series(sample.labels, float(sample.value)))
    return found


def pick(text: bytes, name: str) -> list[Series]:
    """Return the series of one name without parsing the rest of the text.

    A line feed inside a label's value is escaped, so a line that begins with the name is one of its series, and no
    other is. Raises ValueError on a line without a number.
    """
    wanted, found, at = name.encode(), [], 0
    while (at := text.find(wanted, at)) >= 0:
        end = text.find(b"\n", at)
        line = text[at : end if end >= 0 else None]
        if (at == 0 or text[at - 1] == ord("\n")) and line[len(wanted) : len(wanted) + 1] in (b"{", b" ", b"\t"):
            found.append(_series(line[len(wanted) :]))
        at += len(line)
    return found


def _series(rest: bytes) -> Series:
    labels, _, value = rest.rpartition(b"}")
    fields = value.split()
    if not fields:
        raise ValueError(f"no number in the line's end {rest[-80:]!r}")
    return Series({key.decode(): one.decode() for key, one in _LABEL.findall(labels)}, float(fields[0]))


def having(series: Iterable[Series], labels: Mapping[str, str]) -> list[Series]:
    """Return the series that have all of these labels."""
    return [one for one in series if all(one.labels.get(key) == value for key, value in labels.items())]


def over_priorities(series: Sequence[Series]) -> list[Series]:
    """Return the series of a gauge without those of single priorities, where there is one of all.

    Under priority scheduling SGLang gives each gauge of requests once with `priority=""`, which counts all of them, and
    once more for each priority.
    """
    if not any(one.labels.get("priority") == "" for one in series):
        return list(series)
    return [one for one in series if not one.labels.get("priority")]


def over_ranks(series: Sequence[Series]) -> float | None:
    """Return the sum over data-parallel ranks, each request counted once; None without a number.

    Ranks of one data-parallel rank (tensor, pipeline, expert) do the same requests, and a release may let one of them
    report or all: of these the greatest is taken, as one may be read a moment after another. Series that differ in
    other labels (a cache's source, whether an answer was streamed) are parts and are summed.
    """
    parts: dict[str, dict[tuple[str, ...], float]] = {}
    for one in series:
        if math.isfinite(one.value):
            ranks = parts.setdefault(one.labels.get("dp_rank", ""), {})
            rank = tuple(one.labels.get(label, "") for label in _RANKS)
            ranks[rank] = ranks.get(rank, 0.0) + one.value
    return sum(max(ranks.values()) for ranks in parts.values()) if parts else None
