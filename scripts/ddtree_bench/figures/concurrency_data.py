"""What the figure over the concurrency draws, as data: throughputs, ratios to AR, and where AR overtakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ddtree_bench.comparisons import run_ratios, succeeded
from ddtree_bench.figures import style
from ddtree_bench.figures.facets import along_concurrency, in_order

DRAWN = [
    "panel",
    "quantity",
    "unit",
    "method",
    "configuration",
    "concurrency",
    "kind",
    "repeat",
    "value",
    "low",
    "high",
    "low_open",
    "high_open",
    "interval",
    "direction",
    "n",
    "pairing",
    "window",
    "reason",
]
DASH = "–"
Line = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One target, engine, model, parallelism and workload at all concurrencies: its rows of each table.

    Every frame has the column `configuration`; `ratios` are those to AR.
    """

    title: str
    cells: pd.DataFrame
    budget: pd.DataFrame
    ratios: pd.DataFrame
    crossovers: pd.DataFrame

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The concurrencies that have a cell, ascending."""
        return tuple(sorted(int(c) for c in self.cells["concurrency"].unique()))

    @property
    def order(self) -> list[str]:
        """The configurations in reading order."""
        return list(dict.fromkeys(str(group["configuration"].iloc[0]) for group in in_order(self.cells)))


def parts(tables: Mapping[str, pd.DataFrame]) -> list[Part]:
    """Cut the tables `cells`, `budget`, `speedup` and `crossovers` into the parts that stand one below the other."""
    speedup = tables["speedup"]
    frames = {
        "budget": tables["budget"],
        "ratios": speedup[speedup["baseline"] == "AR"],
        "crossovers": tables["crossovers"],
    }
    cut = {name: dict(along_concurrency(frame)) for name, frame in frames.items()}
    nothing = {name: frame.iloc[:0].assign(configuration=None) for name, frame in frames.items()}
    return [
        Part(title, cells, **{name: cut[name].get(title, nothing[name]) for name in frames})
        for title, cells in along_concurrency(tables["cells"])
    ]


def lines(part: Part, every_cell: pd.DataFrame) -> list[Line]:
    """What a part shows, one line a mark."""
    return [*_throughputs(part), *_ratios(part, every_cell), *_crossings(part)]


def _throughputs(part: Part) -> Iterator[Line]:
    windows: dict[int, str] = {}
    for row in part.budget.to_dict("records"):
        windows[row["concurrency"]] = row["window"]
        if row["n"]:
            yield _common(row, "throughput") | {
                "kind": "mean",
                "value": row["throughput_tok_s"],
                "low": row["throughput_low_tok_s"],
                "high": row["throughput_high_tok_s"],
                "n": row["n"],
                "window": row["window"],
            }
    counts = succeeded(part.cells).groupby(["configuration", "concurrency"])["repeat"].transform("size")
    for row in succeeded(part.cells)[counts <= style.MAX_POINTS].to_dict("records"):
        window = windows[row["concurrency"]]
        value = row[f"throughput_{window}_tok_s"]
        yield _common(row, "throughput") | {"kind": "run", "repeat": row["repeat"], "value": value, "window": window}
    for row in part.cells[part.cells["status"] != "ok"].to_dict("records"):
        yield _common(row, "throughput") | {"kind": "failed", "repeat": row["repeat"], "reason": row["reason"]}


def _ratios(part: Part, every_cell: pd.DataFrame) -> Iterator[Line]:
    for row in part.ratios.to_dict("records"):
        common = _common(row, "ratio") | {"pairing": row["pairing"]}
        if row["comparison"] != "ok":
            yield common | {"kind": "none", "reason": row["reason"]}
            continue
        ends = {"value": row["speedup"], "low": row["speedup_low"], "high": row["speedup_high"]}
        yield common | ends | {"kind": "mean", "n": row["n"], "window": row["window"]}
        pairs = run_ratios(every_cell, row)
        if len(pairs) <= style.MAX_POINTS:
            for repeat, value in zip(pairs["repeat"], pairs["speedup"], strict=True):
                yield common | {"kind": "run", "repeat": repeat, "value": value, "window": row["window"]}


def _crossings(part: Part) -> Iterator[Line]:
    for row in part.crossovers.to_dict("records"):
        if row["outcome"] in ("no_ratio", "one_concurrency"):
            continue
        yield _common(row, "crossing") | {
            "kind": "crossing" if row["outcome"] == "crosses" else row["outcome"],
            "value": row["crossing_at"],
            "low": row["crossing_low"],
            "high": row["crossing_high"],
            **{name: row[name] for name in ("low_open", "high_open", "interval", "direction", "n", "pairing")},
        }


def _common(row: Mapping[str, Any], quantity: str) -> Line:
    unit = {"throughput": "tokens/s", "ratio": "", "crossing": "requests"}[quantity]
    named = {name: row.get(name) for name in ("method", "configuration", "concurrency")}
    return {**named, "quantity": quantity, "unit": unit}


def verdict(rows: pd.DataFrame) -> str:
    """Where AR overtakes a configuration, in words, by its rows of the crossovers table; a line a crossing.

    `3.4 [2.9, 4.1]` with a t-interval, `3.4 (2 to 4)` with the bracket of measured neighbours.
    """
    if rows.empty:
        return DASH
    return "\n".join(_verdict(row) for row in rows.to_dict("records"))


def _verdict(row: Mapping[str, Any]) -> str:
    if row["outcome"] == "no_ratio":
        return "no ratio to AR"
    if row["outcome"] == "one_concurrency":
        return f"only C = {row['measured_from']} measured"
    if row["outcome"] == "crosses":
        text = f"{_number(row['crossing_at'])} {_interval(row)}"
        return text if row["direction"] == "falls" else f"(ahead from {text})"
    text = f"not up to {row['measured_to']}" if row["outcome"] == "above" else f"already at {row['measured_from']}"
    return f"{text} {_interval(row)}" if row["interval"] == "t" else text


def _interval(row: Mapping[str, Any]) -> str:
    if row["interval"] == "bracket":
        return f"({row['neighbour_low']} to {row['neighbour_high']})"
    low = f"<{row['measured_from']}" if row["low_open"] else _number(row["crossing_low"])
    high = f">{row['measured_to']}" if row["high_open"] else _number(row["crossing_high"])
    return f"[{low}, {high}]"


def _number(concurrency: float) -> str:
    return f"{concurrency:.1f}" if concurrency < 100 else f"{concurrency:.0f}"


def accept_length(rows: pd.DataFrame) -> str:
    """`2.16`, or `2.10–2.16` when it differs between concurrencies, on the prompts that all of them have."""
    if rows.empty or pd.isna(rows["accept_length_common_low"].iloc[0]):
        return DASH
    low, high = (style.number(rows[f"accept_length_common_{end}"].iloc[0]) for end in ("low", "high"))
    return low if low == high else f"{low}–{high}"
