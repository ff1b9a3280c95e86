"""Views: what the workflow declares as outputs, copied from the store and naming the entry they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_bench.plan import Cell, Run
from ddtree_bench.records.files import write_json
from ddtree_bench.records.store import Attempt, Store, StoreError


def read_view(path: Path) -> dict[str, Any]:
    """Read a view. Raises StoreError that names the file when it is none."""
    try:
        view = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: is no view ({error}); delete it and run the workflow to restore it") from error
    return dict(view)


def write_run_views(run: Run, attempts: Mapping[Cell, Attempt], store: Store, results: Path) -> None:
    """Write the view of every cell of a run and the run's warm-up record below `results`."""
    for cell, attempt in attempts.items():
        write_json(results / cell.view, cell_view(cell, attempt, store))
    write_json(results / run.warmup_view, warmup_view(run, list(attempts.values())))


def cell_view(cell: Cell, attempt: Attempt, store: Store) -> dict[str, Any]:
    """Return the view of an attempt: its record under the plan's labels, its place in the store, its digest."""
    return {
        **attempt.record,
        "labels": cell.labels,
        "entry": store.relative(attempt),
        "content_sha256": attempt.content_sha256,
    }


def warmup_view(run: Run, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return what each server start of a run cost before its first measured request.

    An endpoint that runs on is one start in every pass, and is warmed up in each.
    """
    starts = {}
    for record in (attempt.record for attempt in attempts):
        starts[record["start_id"], record["block"]] = {
            key: record[key] for key in ("start_id", "block", "status", "started_at", "ready_s", "warmup")
        }
    labels = {"target": run.server.target, "server": run.server.name}
    return {"schema": 1, "labels": labels, "repeat": run.repeat, "starts": list(starts.values())}
