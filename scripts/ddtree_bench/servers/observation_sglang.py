"""What SGLang says of itself, read by the names of its release."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench import keys
from ddtree_bench.servers import prometheus_text
from ddtree_bench.servers.observation_names import MOMENTS, TOTALS
from ddtree_bench.servers.pages import Unanswered
from ddtree_bench.servers.prometheus_text import Series
from ddtree_bench.servers.sglang_releases import (
    NEVER,
    NEWEST,
    OLDEST,
    REQUEST_OFFERS,
    Offer,
    Release,
    offers,
    shown,
    why_not,
)

_OF_THE_START = ("startup_time", "random_seed", "ddtree_start_id")
"""What /server_info tells that is another after the next start: how long that took (from 0.5.17), the seed, unless it
was given, and the name that our plugin repeats. SGLang's /metrics has no time of the process's start."""

_RATIOS = ("accept_length_interval", "accept_rate_interval", "accept_length_lifetime")
_NO_SPECULATION = "the server does not speculate"
_NO_TREES = "the server has no trees: only DDTREE of our plugin does"
_NO_REPORT = "no decode report yet: the first comes after 40 decode steps (--decode-log-interval)"

Text = str | Unanswered


@dataclass(frozen=True)
class Found:
    """Values, why others are missing, what tells one start from another, and what a reader should know."""

    values: dict[str, float]
    missing: dict[str, str]
    started: str | None
    notes: tuple[str, ...]


class Missing(Exception):
    """A value that is not there; the message says why."""


def read(release: Release, info: Any, text: Text, loads: Any) -> Found:
    """Return what the pages say.

    `info` and `loads` are the JSON of /server_info and /v1/loads, `text` that of /metrics, each an Unanswered where it
    could not be had. Where no version is told the names are those that all releases share, and a counter that is absent
    is not taken as 0. A release that is too old gives nothing.
    """
    if release.refused:
        return Found({}, dict.fromkeys((*TOTALS, *MOMENTS), release.note or ""), None, ())
    pages = _Pages(release, info, text, loads)
    values, missing = {}, {}
    for name in (*TOTALS, *MOMENTS):
        try:
            values[name] = pages.value(name)
        except Missing as reason:
            missing[name] = str(reason)
    return Found(values, missing, pages.started(), _notes(release))


def _notes(release: Release) -> tuple[str, ...]:
    notes = [release.note] if release.note else []
    if release.number and not any(one.place == "spec_tokens_details" for one in offers(release.number, REQUEST_OFFERS)):
        since = next(one.since for one in REQUEST_OFFERS if one.place == "spec_tokens_details")
        notes.append(
            f"SGLang {release.text} ignores return_spec_tokens_details (from {shown(since)}): "
            "its streamed answers tell no rounds and no accept length"
        )
    return tuple(notes)


class _Pages:
    """The pages of one server, and where in them each value is."""

    def __init__(self, release: Release, info: Any, text: Text, loads: Any) -> None:
        self._told_release = release.number is not None
        self._number = release.number or NEWEST
        self._info = info if isinstance(info, dict | Unanswered) else Unanswered("/server_info: no JSON object")
        self._loads = _ranks(loads)
        self._series = _series(text)
        found = offers(self._number)
        everywhere = [one for one in found if one.since == OLDEST and one.until == NEWEST]
        self._offers = found if self._told_release else tuple(everywhere)

    def value(self, name: str) -> float:
        """Return a value. Raises Missing."""
        if name == "accept_rate_interval":
            # Both are 0 before the first report, and only a length of 0 cannot be one.
            self.value("accept_length_interval")
        wanted = [one for one in self._offers if one.name == name]
        reasons = []
        for offer in wanted:
            if offer.speculative and self._speculates() is False:
                raise Missing(_NO_SPECULATION)
            if offer.trees and self._has_trees() is False:
                raise Missing(NEVER.get(name, _NO_TREES))
            try:
                return self._read(offer)
            except Missing as reason:
                reasons.append(str(reason))
        raise Missing("; ".join(dict.fromkeys(reasons)) or why_not(name, self._number))

    def started(self) -> str | None:
        """What differs between two starts, if it is told: a digest."""
        told = {} if isinstance(self._info, Unanswered) else self._info
        found = {name: told[name] for name in _OF_THE_START if told.get(name) is not None}
        return keys.digest(found)[:16] if found else None

    def _speculates(self) -> bool | None:
        if isinstance(self._info, Unanswered) or "speculative_algorithm" not in self._info:
            return None
        return self._info["speculative_algorithm"] is not None

    def _has_trees(self) -> bool | None:
        if isinstance(self._info, Unanswered) or "speculative_algorithm" not in self._info:
            return None
        return bool(self._info["speculative_algorithm"] == "DDTREE")

    def _read(self, offer: Offer) -> float:
        if offer.place == "/metrics":
            return self._from_metrics(offer)
        return self._from_info(offer) if offer.place == "/server_info" else self._from_loads(offer)

    def _from_metrics(self, offer: Offer) -> float:
        if isinstance(self._series, Unanswered):
            raise Missing(f"{self._series}{_HINT if str(self._series).endswith('404') else ''}")
        series = prometheus_text.having(self._series.get(offer.key, []), offer.labels)
        if offer.name in MOMENTS:
            series = prometheus_text.over_priorities(series)
        if offer.name in _RATIOS:
            return _agreed([one.value for one in series], offer)
        total = prometheus_text.over_ranks(series)
        if total is None and not offer.zero:
            raise Missing(f"/metrics has no {offer.key}")
        return self._zero(offer) if total is None else total

    def _zero(self, offer: Offer) -> float:
        """0 for a counter that is absent, which SGLang shows from its first increment on."""
        if not self._told_release:
            raise Missing(f"/metrics has no {offer.key}, and whether it would have cannot be told without the release")
        if offer.speculative and self._speculates() is None:
            raise Missing(f"/metrics has no {offer.key}, and the server does not tell whether it speculates")
        return 0.0

    def _from_info(self, offer: Offer) -> float:
        if isinstance(self._info, Unanswered):
            raise Missing(str(self._info))
        if offer.key in self._info and offer.name == "verify_width":
            return _number(self._info[offer.key], offer)
        found = [_state_value(state, offer) for state in _states(self._info)]
        if offer.name in _RATIOS:
            return _agreed([one for one in found if _is_number(one)], offer)
        return sum(_number(one, offer) for one in found)

    def _from_loads(self, offer: Offer) -> float:
        if isinstance(self._loads, Unanswered):
            raise Missing(str(self._loads))
        return sum(_number(rank.get(offer.key), offer) for rank in self._loads)


_HINT = " (start the server with --enable-metrics)"


def _series(text: Text) -> dict[str, list[Series]] | Unanswered:
    if isinstance(text, Unanswered):
        return text
    try:
        return prometheus_text.parse(text)
    except ValueError as error:
        return Unanswered(f"/metrics: no Prometheus text ({error})")


def _ranks(loads: Any) -> Sequence[Mapping[str, Any]] | Unanswered:
    if isinstance(loads, Unanswered):
        return loads
    ranks = loads.get("loads") if isinstance(loads, dict) else None
    if not isinstance(ranks, list) or not ranks or not all(isinstance(one, dict) for one in ranks):
        return Unanswered("/v1/loads: no list of ranks")
    return ranks


def _states(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The state of each data-parallel rank; they come in no order and without their numbers."""
    states = info.get("internal_states")
    found: list[Mapping[str, Any]] = (
        [one for one in states if isinstance(one, dict)] if isinstance(states, list) else []
    )
    if not found:
        raise Missing("/server_info has no internal_states")
    return found


def _state_value(state: Mapping[str, Any], offer: Offer) -> Any:
    if offer.name != "verify_graph_memory_gb":
        return state.get(offer.key)
    memory = state.get("memory_usage")
    graph = memory.get("graph") if isinstance(memory, dict) else None
    return graph.get(offer.key) if isinstance(graph, dict) else None


def _agreed(values: Sequence[float], offer: Offer) -> float:
    """A ratio that all ranks agree on; a mean of ratios without their denominators would be the ratio of nothing."""
    known = [one for one in values if math.isfinite(one)]
    if not known or (offer.name != "accept_rate_interval" and not any(known)):
        raise Missing(_NO_REPORT)
    if max(known) - min(known) > 1e-9:
        shown_values = ", ".join(f"{one:g}" for one in sorted(known))
        raise Missing(f"the data-parallel ranks differ ({shown_values}) and do not tell their weights")
    return known[0]


def _number(value: Any, offer: Offer) -> float:
    if not _is_number(value):
        raise Missing(f"{offer.place} has no number {offer.key}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
