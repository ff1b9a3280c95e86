"""What load clients on a target have measured while nobody was there to fetch it goes into the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddtree_bench import keys
from ddtree_bench.cell_record import store_measured
from ddtree_bench.load.on_target import REQUEST
from ddtree_bench.load.outcome import OutcomeDamaged
from ddtree_bench.plan import Cell
from ddtree_bench.project import Report
from ddtree_bench.records.store import Store
from ddtree_bench.spool import Spool, Spooled


def collect(spool: Spool, cells: Iterable[Cell], store: Store, secrets: Sequence[str], report: Report) -> None:
    """Store what clients on the target have measured of some cells and nobody has fetched, and remove it there.

    What is stored already is not stored again. An entry without an end, or whose server had ended, is removed, a
    damaged one moved aside: such cells are to be measured again. Entries of other cells and other workflows stay.
    """
    wanted = {keys.short(cell.key): cell for cell in cells}
    for entry in spool.entries():
        cell = wanted.get(entry.partition("-")[0])
        if cell is None:
            continue
        if not spool.is_own(entry):
            report(f"{cell.view}: {spool.path(entry)} on the target is another workflow's, and left to it")
            continue
        if not spool.finished(entry):
            report(f"{cell.view}: its client on the target was ended before it had done; it is measured again")
            spool.remove(entry)
            continue
        try:
            kept = _store_once(spool.fetch(entry), cell, store, secrets)
        except OutcomeDamaged as damage:
            report(f"{cell.view}: what lay on the target is damaged ({damage}), and now in {spool.move_aside(entry)}")
            continue
        report(f"{cell.view}: {kept}")
        spool.remove(entry)


def _store_once(spooled: Spooled, cell: Cell, store: Store, secrets: Sequence[str]) -> str:
    """Store a fetched outcome unless that was done before; returns in words what became of it."""
    draft, outcome = spooled.request.draft, spooled.outcome
    _confirm_draft(draft, cell)
    if any(one.record.get("spooled") == outcome.spooled for one in store.attempts(cell.key, draft["host_key"])):
        return "what lay on the target was stored before"
    if outcome.server_ended or not (outcome.measurement.requests["status"] == "ok").any():
        ended = f"the server {outcome.server_ended}" if outcome.server_ended else "no request succeeded"
        return f"{ended} while nobody watched, so it is measured again"
    store_measured(store, draft, outcome, secrets)
    return f"was measured on the target at {outcome.ended_at}, and is now in the store"


def _confirm_draft(draft: Mapping[str, Any], cell: Cell) -> None:
    known = isinstance(draft.get("host_key"), str) and draft.get("plan_key") == cell.key
    if not known or keys.digest(draft.get("identity")) != cell.key:
        raise OutcomeDamaged(f"{REQUEST} is not that of the cell")
