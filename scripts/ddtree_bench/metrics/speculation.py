"""What speculation did: rounds, accept length in its three forms, acceptance by depth, and the proof of the tree."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_bench.load import sse
from ddtree_bench.metrics.tokens import Row

_NAMES: dict[str, tuple[str, ...]] = {
    "rounds": ("spec_verify_ct",),
    "accepted": ("spec_num_correct_drafts", "spec_accepted_drafts"),
    "proposed": ("spec_num_proposed_drafts", "spec_proposed_drafts"),
    "tree_nodes": ("spec_tree_nodes",),
    "branching_nodes": ("spec_tree_branching_nodes",),
    "max_depth": ("spec_tree_max_depth",),
    "retractions": ("spec_retractions", "num_retractions"),
}
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
"""Names of the details; the second is what SGLang called it up to 0.5.20 (`num_retractions`: in its meta_info)."""


@dataclass(frozen=True)
class Details:
    """A request's spec_tokens_details under stable names; None where the server does not say.

    `histogram[k]` is the number of rounds with k accepted drafts, before the cut of the last round. `tree_nodes` (root
    not counted) and `branching_nodes` are sums over the rounds, `max_depth` is their greatest. `retractions` is how
    often a full cache put the request back into the queue.
    """

    rounds: int | None
    accepted: int | None
    proposed: int | None
    histogram: tuple[int, ...] | None
    tree_nodes: int | None
    branching_nodes: int | None
    max_depth: int | None
    retractions: int | None

    @property
    def prefills(self) -> int:
        """Tokens that no round committed: one of the first prefill and one of that after each retraction."""
        return 1 + (self.retractions or 0)

    @property
    def accepted_by_rounds(self) -> int | None:
        """Accepted drafts before the cut: sum of k h[k], and without a histogram what the server counted."""
        return self.accepted if self.histogram is None else sum(k * n for k, n in enumerate(self.histogram))

    @property
    def accept_length_rounds(self) -> float | None:
        """1 + sum k h[k] / sum h[k]: tokens committed a round, bonus included, before the cut."""
        if self.histogram is None or not sum(self.histogram):
            return None
        return 1 + sum(k * n for k, n in enumerate(self.histogram)) / sum(self.histogram)


NOTHING_TOLD = Details(None, None, None, None, None, None, None, None)

NO_ROUND = Details(0, 0, 0, None, 0, 0, 0, None)
"""Of an answer that was over with the prefill's token, where the server says nothing of such answers."""


def details(row: Row) -> Details:
    """Return the details of a raw row (its column `spec`), all None when there are none."""
    spec = row["spec"]
    fields: dict[str, Any] = json.loads(spec) if isinstance(spec, str) else {}
    histogram = _first(fields, _HISTOGRAM)
    counts = isinstance(histogram, list) and all(sse.count(n) is not None for n in histogram)
    return Details(
        **{name: sse.count(_first(fields, names)) for name, names in _NAMES.items()},
        histogram=tuple(histogram) if counts else None,
    )


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def identity_holds(spec: Details, tokens: int | None) -> bool | None:
    """Return whether N = prefills + rounds + accepted drafts, up to the cut of the last round; None if unknown.

    The last round commits at least one of its k + 1 tokens, so the cut (at max_tokens or a stop) takes at most k of
    them, and k is no more than the greatest number of drafts accepted in any round. The histogram counts each round;
    a request whose prefill's token was its last has no round and needs none.
    """
    lacking = _missing_prefills(spec, tokens)
    return None if lacking is None else lacking == 0


def _missing_prefills(spec: Details, tokens: int | None) -> float | None:
    """How many prefills more than the server told of would make the identity hold; inf when none would."""
    if spec.rounds == 0 and spec.histogram is None:
        return 0 if tokens == spec.prefills else None
    if spec.rounds is None or spec.histogram is None or tokens is None:
        return None
    cut = spec.prefills + spec.rounds + sum(k * n for k, n in enumerate(spec.histogram)) - tokens
    deepest = max((k for k, n in enumerate(spec.histogram) if n), default=0)
    if sum(spec.histogram) != spec.rounds or cut > deepest:
        return math.inf
    return max(0, -cut)


def identity_broken(specs: Sequence[Details], tokens: Sequence[int | None], untold: int = 0) -> int | None:
    """Return how many requests break the identity; None as soon as that of one is not known.

    `untold` prefills after retractions, which no request was told to have had, may be missing in all of them together.
    """
    lacking = [_missing_prefills(spec, n) for spec, n in zip(specs, tokens, strict=True)]
    if not lacking or None in lacking:
        return None
    broken = [one for one in lacking if one]
    return 0 if sum(one for one in broken if one is not None) <= untold else len(broken)


def request_speculation(spec: Details, tokens: int | None) -> dict[str, Any]:
    """Return the speculation columns of one request; `accept_length` is (N - prefills) / rounds."""
    return {
        "rounds": spec.rounds,
        "accepted_drafts": spec.accepted_by_rounds,
        "proposed_drafts": spec.proposed,
        "accept_length": (tokens - spec.prefills) / spec.rounds if tokens is not None and spec.rounds else None,
        "accept_length_rounds": spec.accept_length_rounds,
        "tree_nodes": spec.tree_nodes,
        "tree_branching_nodes": spec.branching_nodes,
        "tree_max_depth": spec.max_depth,
        "identity_holds": identity_holds(spec, tokens),
    }


def cell_speculation(
    specs: Sequence[Details], tokens: Sequence[int | None], retractions: int | None = 0
) -> dict[str, Any]:
    """Return the speculation of a cell from its ok requests' details and output tokens.

    A sum, and the greatest depth, is None as soon as one request lacks the value: that of some of them would be a
    number of another cell. `retractions` are those of the requests together by the server's count, for servers that do
    not tell of them by request; None: there were some, and not all in these requests.
    """
    rounds, proposed = _sum(s.rounds for s in specs), _sum(s.proposed for s in specs)
    committed = _sum(None if n is None else n - s.prefills for s, n in zip(specs, tokens, strict=True))
    untold = None if retractions is None else max(0, retractions - sum(s.retractions or 0 for s in specs))
    committed = None if committed is None or untold is None else committed - untold
    macro = [s.accept_length_rounds for s in specs if s.rounds != 0]
    histogram = _pooled(specs) if all(s.histogram is not None for s in specs if s.rounds != 0) else None
    nodes, branching = _sum(s.tree_nodes for s in specs), _sum(s.branching_nodes for s in specs)
    return {
        "rounds": rounds,
        "accepted_drafts": _sum(s.accepted_by_rounds for s in specs),
        "proposed_drafts": proposed,
        "accept_length": _ratio(committed, rounds),
        "accept_length_rounds": _accept_length(histogram),
        "accept_length_macro": _mean(macro),
        "acceptance_rate": _ratio(_sum(s.accepted for s in specs), proposed),
        "identity_broken": None if untold is None else identity_broken(specs, tokens, untold),
        "tree_nodes_per_round": _ratio(nodes, rounds),
        "tree_branching_nodes_per_round": _ratio(branching, rounds),
        "tree_max_depth": _greatest(s.max_depth for s in specs),
        "tree_is_chain": None if branching is None or not rounds else branching == 0,
    }


def with_counted_trees(speculation: dict[str, Any], counters: Mapping[str, float]) -> dict[str, Any]:
    """Return a cell's speculation with its trees from the server's counters, where no answer tells of them.

    `counters` are differences over the cell. They count each round with a tree, those of requests that failed too, so
    they give values a round and no sums; of depths they tell nothing.
    """
    nodes, branching = (counters.get(f"tree_{what}_total") for what in ("nodes", "branching_nodes"))
    rounds = counters.get("tree_rounds_total")
    told = speculation["tree_nodes_per_round"] is not None or speculation["tree_is_chain"] is not None
    if told or nodes is None or branching is None or not rounds:
        return speculation
    return {
        **speculation,
        "tree_nodes_per_round": nodes / rounds,
        "tree_branching_nodes_per_round": branching / rounds,
        "tree_is_chain": branching == 0,
    }


def depth_probabilities(specs: Iterable[Details]) -> tuple[list[float], int]:
    """Return P(at least d drafts of a round are accepted) for d = 1, 2, ... and the number of rounds it stands on.

    The sum of h[k] over k >= d by the sum of h, pooled over the requests that have a histogram h; ([], 0) without one.
    """
    histogram = _pooled(specs)
    rounds = int(histogram.sum()) if histogram is not None else 0
    if histogram is None or not rounds:
        return [], 0
    at_least = np.cumsum(histogram[::-1])[::-1]
    return [float(p) for p in at_least[1:] / rounds], rounds


def _pooled(specs: Iterable[Details]) -> NDArray[np.int64] | None:
    histograms = [spec.histogram for spec in specs if spec.histogram is not None]
    if not histograms:
        return None
    pooled = np.zeros(max(len(h) for h in histograms), dtype=np.int64)
    for histogram in histograms:
        pooled[: len(histogram)] += np.asarray(histogram, dtype=np.int64)
    return pooled


def _accept_length(histogram: NDArray[np.int64] | None) -> float | None:
    if histogram is None or not histogram.sum():
        return None
    return 1 + float(np.arange(histogram.size) @ histogram / histogram.sum())


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if not known or None in known else sum(v for v in known if v is not None)


def _greatest(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if not known or None in known else max(v for v in known if v is not None)


def _mean(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else float(np.mean([v for v in values if v is not None]))


def _ratio(numerator: int | None, denominator: int | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator
