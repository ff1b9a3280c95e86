"""What stands in small print below the figure over the concurrency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ddtree_bench.comparisons import succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.concurrency_data import Part
from ddtree_bench.figures.facets import NOT_MEASURED, in_order, marks_of, shortened


def notes_of(found: Sequence[Part]) -> list[str]:
    """The notes of the figure: what marks mean, the work, what is missing or failed, what to know before believing.

    Lines that concern one part alone begin with its title when there are several.
    """
    if not found:
        return ["Nothing to draw: no closed loop is planned, and an open one has no concurrency that is kept."]
    notes = [_about_marks(found), _about_crossings(found)]
    prompts = [_prompts(part) for part in found]
    alike = len(set(prompts)) == 1
    notes += prompts[:1] if alike else []
    for part in found:
        place = f"{part.title}: " if len(found) > 1 else ""
        own = [] if alike else [_prompts(part)]
        notes += [f"{place}{text}" for text in (*own, *_not_measured(part), *_without_ratio(part))]
        notes += [f"× {place}{text}" for text in _failures(part)]
        notes += [f"! {place}{text}" for text in _marks(part)]
    return [note for note in notes if note]


def _about_marks(found: Sequence[Part]) -> str:
    runs = [int(n) for part in found for n in part.budget["n"]]
    starts = style.starts_of([part.cells for part in found])
    interval = style.interval_note(runs, "bars", "95 % t-interval over runs, of ratios of their logarithm")
    return (
        f"{style.n_of(runs)} ({starts}). Large marks: mean of runs, geometric mean of ratios of runs of one "
        f"repeat and block; {interval}{style.points_note(runs, 'single runs and pairs')}. B: budget, K: top-k cap. "
        f"Throughput over {_windows(found)}; its axis starts at 0."
    )


def _about_crossings(found: Sequence[Part]) -> str:
    kinds = {kind for part in found for kind in part.crossovers["interval"].dropna()}
    if not any((part.crossovers["outcome"] == "crosses").any() for part in found) and not kinds:
        return ""
    text = "Diamonds: where the ratio is 1, on the line between measured C."
    if "t" in kinds:
        text += (
            " [a, b]: where the 95 % t-test over pairs of runs does not reject a ratio of 1; < and >: it may go on "
            "beyond what was measured."
        )
    if "bracket" in kinds:
        text += " (a to b), dotted: no interval (fewer than 3 pairs, or unpaired), but the measured C on both sides."
    return text


def _windows(found: Sequence[Part]) -> str:
    full = []
    for part in found:
        if loads := part.budget.loc[part.budget["window"] == "full", "concurrency"].drop_duplicates().tolist():
            full.append((f"{part.title} at " if len(found) > 1 else "") + f"C = {_listed(loads)}")
    if not full:
        return "the steady window (all C requests in flight)"
    if any((part.budget["window"] == "steady").any() for part in found):
        listed = "; ".join(full)
        text = f"the steady window (all C requests in flight), for {listed} the full one (first request to last token)"
    else:
        text = "the full window (first request to last token)"
    by_pair = any((_window_at(part, row) != row["window"]) for part in found for row in _paired(part))
    return text + (", ratios over the steady one where both sides have it" if by_pair else "")


def _paired(part: Part) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = part.ratios[part.ratios["comparison"] == "ok"].to_dict("records")
    return rows


def _window_at(part: Part, row: Mapping[str, Any]) -> str:
    return str(part.budget.loc[part.budget["concurrency"] == row["concurrency"], "window"].iloc[0])


def _prompts(part: Part) -> str:
    """How many prompts the cells hold, and on which of them the accept lengths stand."""
    by_load = part.cells.groupby("concurrency")["n_prompts"].max()
    n = _listed(by_load) if by_load.nunique() > 1 else str(by_load.iloc[0])
    text = f"{n} prompts a cell at C = {_listed(part.concurrencies)}."
    known = part.crossovers.dropna(subset="accept_length_common_low")
    if known.empty:
        return text
    text += " * tokens/round, pooled"
    if len(part.concurrencies) > 1:
        text += f", on the {known['common_prompts'].min()} prompts common to all C"
    differ = (known["accept_length_common_low"] < known["accept_length_common_high"]).any()
    return f"{text}; of two values the least and the greatest over C." if differ else f"{text}."


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def _not_measured(part: Part) -> list[str]:
    """Configurations that lack cells which others have."""
    absent = []
    for name, mine in part.cells.groupby("configuration", sort=False):
        if missing := sorted(set(part.concurrencies) - set(mine["concurrency"])):
            absent.append(f"{name} at C = {_listed(missing)}")
    return [f"No cell: {'; '.join(absent)}."] if absent else []


def _without_ratio(part: Part) -> list[str]:
    """Which ratios are unpaired, and which were refused, with the reason."""
    notes = []
    unpaired = part.ratios[part.ratios["pairing"] == "unpaired"]
    if len(unpaired):
        notes.append(f"Unpaired (measured in other blocks; Welch's interval on log run means): {_where(unpaired)}.")
    refused = part.ratios[part.ratios["comparison"].isin(["refused", "unequal_work"])]
    return notes + [f"{_where(rows)}: {reason}" for reason, rows in refused.groupby("reason", sort=False)]


def _where(rows: pd.DataFrame) -> str:
    return "; ".join(
        f"{name} at C = {_listed(mine['concurrency'])}" for name, mine in rows.groupby("configuration", sort=False)
    )


def _failures(part: Part) -> list[str]:
    """For each configuration, status and reason of runs that failed or were broken off: where, and how many of them."""
    notes = []
    for name in part.order:
        mine = part.cells[part.cells["configuration"] == name]
        lost = mine[mine["status"] != "ok"].fillna({"reason": "no reason recorded"})
        for (status, reason), rows in lost.groupby(["status", "reason"], sort=False):
            counts = [
                f"{c} ({len(some)}/{(mine['concurrency'] == c).sum()})" for c, some in rows.groupby("concurrency")
            ]
            notes.append(f"{name}: runs {NOT_MEASURED[status]} at C = {', '.join(counts)}: {shortened(reason)}")
    return notes


def _marks(part: Part) -> list[str]:
    """What a reader must know before believing the numbers, and whom it concerns, at which concurrencies."""
    concerned: dict[str, dict[str, list[int]]] = {}
    cells = in_order(part.cells)
    for cell in cells:
        for text in marks_of(cell):
            name, concurrency = str(cell["configuration"].iloc[0]), int(cell["concurrency"].iloc[0])
            concerned.setdefault(text, {}).setdefault(name, []).append(concurrency)
    measured = sum(len(succeeded(cell)) > 0 for cell in cells)
    return [f"{text}: {_whom(who, measured, part)}." for text, who in concerned.items()]


def _whom(concerned: Mapping[str, Sequence[int]], measured: int, part: Part) -> str:
    if sum(map(len, concerned.values())) == measured:
        return "all configurations"
    if len(part.concurrencies) == 1:
        return ", ".join(concerned)
    places = {tuple(sorted(loads)) for loads in concerned.values()}
    if len(places) == 1 and set(concerned) == set(part.order):
        return f"all configurations at C = {_listed(places.pop())}"
    return "; ".join(f"{name} at C = {_listed(sorted(loads))}" for name, loads in concerned.items())
