"""Why each cell of a plan is cached or to be measured: which part of its identity is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_bench import keys
from ddtree_bench.plan import Cell
from ddtree_bench.project import Project
from ddtree_bench.record_status import reason_of, timed_out
from ddtree_bench.records.store import Store
from ddtree_bench.status import CellStatus, cell_statuses


def explain(project: Project) -> str:
    """Return a line for every cell: cached, failed with its reason, or to be measured and what is new about it."""
    known = _known_identities(Store(project.folders.store))
    return "\n".join(f"{status.cell.view}: {_reason(status, known)}" for status in cell_statuses(project))


def _reason(status: CellStatus, known: Sequence[Mapping[str, str]]) -> str:
    if status.attempt is None:
        return f"to be measured: {_what_is_new(status.cell, known)}"
    record = status.attempt.record
    if status.state != "cached":
        words = {"failed": "failed", "aborted": "broken off"}
        return f"cached as {words[status.state]}: {reason_of(record)}"
    late = f", {timed_out(record)} requests timed out" if timed_out(record) else ""
    return f"cached: attempt {record['attempt']} of {record['ended_at']}{late}"


def _known_identities(store: Store) -> list[dict[str, str]]:
    """Return the identity of everything that was ever measured, flattened, each once."""
    identities = {attempt.record["plan_key"]: attempt.record["identity"] for attempt in store.readable()}
    return [flatten(identity) for identity in identities.values()]


def _what_is_new(cell: Cell, known: Sequence[Mapping[str, str]]) -> str:
    """Name the keys in which a cell differs from the nearest cell that was measured."""
    if not known:
        return "nothing has been measured yet"
    identity = flatten(cell.identity)
    nearest = min(known, key=lambda other: len(_differing(identity, other)))
    differing = _differing(identity, nearest)
    if not differing:
        return "this configuration was measured on another host, or the target has not been probed yet"
    changes = (f"{key} = {identity.get(key, 'absent')} (nearest: {nearest.get(key, 'absent')})" for key in differing)
    return "new " + ", ".join(changes)


def _differing(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a tree's leaves by dotted key, values as canonical JSON."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = keys.canonical(value)
    return flat
