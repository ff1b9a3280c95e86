"""The tidy tables: from views and the store to frames, and to CSV and back without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from ddtree_bench import budgets, columns, comparisons, crossovers
from ddtree_bench.identical_answers import Answers
from ddtree_bench.metrics import Slos
from ddtree_bench.records.files import sha256_file
from ddtree_bench.records.store import REQUESTS, StoreError, read_attempt
from ddtree_bench.records.views import read_view
from ddtree_bench.table_rows import Counting, add_cell, run_rows

TABLES = ("cells", "runs", "speedup", "acceptance", "budget", "crossovers", "requests")
SIGNIFICANT_DIGITS = 12
PANDAS_TYPES = {"text": "object", "int": "Int64", "float": "float64", "bool": "boolean"}

Counted = tuple[str, str, str]
"""Whose answers a tokenizer counts: target, model, revision."""


class TablesError(ValueError):
    """Views, entries or table files that no tables can be made of; the message names them and the remedy."""


class MissingEntry(TablesError):
    """A view whose store entry is absent or is not the one that the view was copied from."""


def build_tables(
    views: Sequence[Path],
    store: Path,
    named: Sequence[comparisons.Named] = (),
    slos: Mapping[str, Slos] | None = None,
    countings: Mapping[Counted, Counting] | None = None,
) -> dict[str, pd.DataFrame]:
    """Return the tables of `TABLES` for the given views.

    Parameters
    ----------
    views : sequence of paths
        Views of cells, in any order; warm-up views of runs may be among them and are passed over.
    store : path
        The store that holds the entries of the views.
    named : sequence of Named
        Comparisons that were named before measuring; Holm's correction runs over these.
    slos : mapping, optional
        The service level objectives of each workload that has some, by its name.
    countings : mapping, optional
        What counts the tokens of answers where the server did not, by target, model and revision.

    Raises
    ------
    MissingEntry
        A view's entry is absent or differs in content; the message names both.
    TablesError
        Two views stand for one cell, or a file is no view; the message names them.
    KeyError
        A metric has no documentation in `columns`.
    """
    contents = [(path, read_view(path)) for path in sorted(set(views))]
    for path, view in contents:
        if not {"entry", "starts"} & view.keys():
            raise TablesError(f"{path}: is no view of a cell or a run; delete it and run the workflow to restore it")
    records = [(view, _attempt(path, view, store)) for path, view in contents if "entry" in view]
    _require_distinct([(path, view) for path, view in contents if "entry" in view])
    rows: dict[str, list[dict[str, Any]]] = {"cells": [], "acceptance": [], "requests": []}
    for record, folder in records:
        counting = (countings or {}).get(_counted(record))
        add_cell(rows, record, folder, (slos or {}).get(record["labels"]["workload"]), counting)
    rows["runs"] = run_rows([record for record, _ in records])
    frames = {name: typed(found, name) for name, found in rows.items()}
    answers = Answers(frames["requests"], _reader({record["plan_key"]: folder for record, folder in records}))
    frames["speedup"] = typed(comparisons.speedup_rows(frames["cells"], named, answers), "speedup")
    frames["budget"] = typed(budgets.budget_rows(frames["cells"]), "budget")
    crossings = crossovers.crossover_rows(frames["cells"], frames["speedup"], frames["requests"])
    frames["crossovers"] = typed(crossings, "crossovers")
    return {name: frames[name] for name in TABLES}


def _counted(record: Mapping[str, Any]) -> Counted:
    server = record["identity"]["server"]
    return server["target"], server["model"]["name"], server["model"]["revision"]


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> list[Path]:
    """Write each table as `<folder>/<name>.csv` (UTF-8, LF, rows sorted, empty for NA) and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, frame in tables.items():
        path = folder / f"{name}.csv"
        partial = path.with_suffix(".csv.partial")
        frame.to_csv(partial, index=False, lineterminator="\n")
        partial.replace(path)
        paths.append(path)
    return paths


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Read what `write_tables` wrote; every value and type comes back as it was.

    Raises TablesError naming the table that is absent, or the columns in which it differs from this version's.
    """
    tables = {}
    for name in TABLES:
        path = folder / f"{name}.csv"
        if not path.exists():
            raise TablesError(f"{path}: no such table; `snakemake make_tables` makes it")
        raw = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
        if differing := sorted(set(raw.columns) ^ set(columns.TABLES[name])):
            raise TablesError(
                f"{path}: of another version, which differs in {', '.join(differing)}; "
                "`snakemake --force make_tables` makes it anew"
            )
        tables[name] = _convert(raw, name)
    return tables


def typed(rows: Iterable[Mapping[str, Any]], table: str) -> pd.DataFrame:
    """Rows as the frame of a table: documented columns in their order, types, 12 significant digits, stable row order.

    Raises KeyError naming a column that `columns` does not document for this table.
    """
    known = columns.TABLES[table]
    rows = list(rows)
    unknown = sorted({key for row in rows for key in row} - set(known))
    if unknown:
        raise KeyError(f"table {table}: {', '.join(unknown)} not documented in ddtree_bench.columns")
    frame = _convert(pd.DataFrame(rows, columns=list(known), dtype=object), table)
    order = [key for key in columns.ORDER if key in known]
    return frame.sort_values(order, kind="stable", na_position="first", ignore_index=True)


def _convert(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    known = columns.TABLES[table]
    converted = {}
    for name in frame.columns:
        values, kind = frame[name], known[name].kind
        if kind == "float":
            numbers = pd.to_numeric(values).astype("float64")
            values = numbers.map(lambda x: float(f"{x:.{SIGNIFICANT_DIGITS}g}"))
        elif kind == "int":
            values = pd.to_numeric(values)
        elif kind == "bool":
            values = values.map({"True": True, "False": False, True: True, False: False})
        else:
            values = values.astype(object).where(values.notna(), None)
        converted[name] = values.astype(PANDAS_TYPES[kind])
    return pd.DataFrame(converted, columns=frame.columns)


def _require_distinct(views: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    seen: dict[str, Path] = {}
    for path, view in views:
        first = seen.setdefault(view["plan_key"], path)
        if first != path:
            raise TablesError(f"{first} and {path} stand for the same cell; delete the one whose name is out of date")


def _reader(folders: Mapping[str, Path]) -> Callable[[str], Mapping[int, str]]:
    """A function from a cell's plan key to the texts of its requests by index."""

    @lru_cache(maxsize=8)
    def texts(plan_key: str) -> Mapping[int, str]:
        frame = pd.read_parquet(folders[plan_key] / REQUESTS, columns=["index", "text"])
        return dict(zip(frame["index"], frame["text"], strict=True))

    return texts


def _attempt(path: Path, view: Mapping[str, Any], store: Path) -> Path:
    """The folder of the attempt a view stands for, once its content is known to be the same."""
    try:
        attempt = read_attempt(store / view["entry"])
    except StoreError as error:
        raise MissingEntry(f"{path}: its entry is not in the store: {error}") from error
    if attempt.content_sha256 != view["content_sha256"]:
        raise MissingEntry(
            f"{path}: its entry {attempt.folder} is not what it was copied from; delete the view to copy it again"
        )
    requests, expected = attempt.folder / REQUESTS, attempt.record["files"].get(REQUESTS)
    if expected is not None and not (requests.is_file() and sha256_file(requests) == expected):
        raise MissingEntry(f"{path}: {requests} is missing or damaged; restore the store, or measure this cell again")
    return attempt.folder
