"""What the report shows of the tables, as plain rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ddtree_bench.figures.facets import in_order, name_of, panels
from ddtree_bench.figures.style import n_of, number

DASH = "–"
NO_RATIO = {"no_baseline": "no baseline", "no_runs": "no run"}
"""Why there is no ratio, where that is short to say; of unlike cells the keys that differ are named."""


@dataclass(frozen=True)
class Listing:
    """A table of text: a title, the heads of its columns and its rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary(tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """What was measured, where, when and how often, each in a phrase."""
    cells, runs = tables["cells"], tables["runs"]
    if cells.empty:
        return {"Cells": "none measured yet"}
    panel_names = [name_of(group.iloc[0]) for group in in_order(cells)]
    good, failed = int((cells["status"] == "ok").sum()), int((cells["status"] != "ok").sum())
    hosts = {f"{row['target']} ({_machine(row)})" for _, row in runs.iterrows()} or set(cells["target"])
    return {
        "Measured": ", ".join(dict.fromkeys(panel_names)),
        "Model": "; ".join(_distinct(cells, ("model", "model_revision"))),
        "Work": "; ".join(_work(cells)),
        "Where": "; ".join(sorted(hosts)),
        "When": f"{_minute(cells['started_at'].min())} to {_minute(cells['ended_at'].max())}",
        "Cells": f"{good} measured" + (f", {failed} failed" if failed else ""),
        "Runs": n_of(list(tables["budget"]["n"])) + " (fresh server starts) for each configuration",
    }


def _distinct(frame: pd.DataFrame, names: tuple[str, ...]) -> list[str]:
    rows = frame[list(names)].drop_duplicates().itertuples(index=False)
    return [" @ ".join(str(value) for value in row) for row in rows]


def _work(cells: pd.DataFrame) -> list[str]:
    phrase = (
        "{workload}: {n_prompts} prompts, up to {max_tokens} tokens, temperature {temperature:g}, C = {concurrency}"
    )
    names = ["workload", "n_prompts", "max_tokens", "temperature", "concurrency"]
    return [phrase.format(**row) for row in cells[names].drop_duplicates().to_dict("records")]


def _minute(stamp: Any) -> str:
    return str(stamp)[:16].replace("T", " ")


def _machine(row: Mapping[str, Any]) -> str:
    gpus = f"{row['gpu_count']} × {row['gpu_model']}, " if row["gpu_model"] else ""
    return f"{gpus}{row['cpu_model']}, {row['cpu_cores']} cores"


def answers(tables: Mapping[str, pd.DataFrame]) -> list[Listing]:
    """The answer: for each target, workload and concurrency a row a configuration."""
    ratios = dict(panels(tables["speedup"])) if len(tables["speedup"]) else {}
    heads = ("Configuration", "n", "Tokens/s", "Over AR", "Over DFlash", "Accept length", "Round time (ms)")
    listings = []
    for title, panel in panels(tables["budget"]):
        mine = ratios.get(title, tables["speedup"].iloc[:0].assign(configuration=None))
        rows = tuple(_answer(group.iloc[0], mine) for group in in_order(panel))
        listings.append(Listing(title, heads, rows))
    return listings


def _answer(row: pd.Series, ratios: pd.DataFrame) -> tuple[str, ...]:
    mine = ratios[ratios["configuration"] == row["configuration"]]
    count = str(row["n"]) + (f" ({row['n_failed']} failed)" if row["n_failed"] else "")
    length = ranged(row["accept_length"], row["accept_length_low"], row["accept_length_high"])
    milliseconds = [1000 * row[name] for name in ("round_time_s", "round_time_low_s", "round_time_high_s")]
    return (
        row["configuration"],
        count,
        ranged(row["throughput_tok_s"], row["throughput_low_tok_s"], row["throughput_high_tok_s"]),
        *(_ratio(row, mine[mine["baseline"] == baseline], baseline) for baseline in ("AR", "DFLASH")),
        "1" if row["method"] == "AR" else length,
        ranged(*milliseconds),
    )


def _ratio(row: pd.Series, found: pd.DataFrame, baseline: str) -> str:
    if row["method"] == baseline:
        return "baseline"
    if found.empty:
        return DASH
    ratio = found.iloc[0]
    if ratio["comparison"] != "ok":
        return NO_RATIO.get(ratio["comparison"]) or str(ratio["reason"])
    mark = " (unpaired)" if ratio["pairing"] == "unpaired" else ""
    return ranged(ratio["speedup"], ratio["speedup_low"], ratio["speedup_high"], unit="×") + mark


def ranged(estimate: float, low: float, high: float, unit: str = "") -> str:
    """`2.26× [2.18, 2.34]`; without bounds where there are none, a dash without an estimate."""
    if estimate != estimate:
        return DASH
    text = f"{number(estimate)}{unit}"
    return text if low != low else f"{text} [{number(low)}, {number(high)}]"


def failures(cells: pd.DataFrame) -> list[dict[str, str]]:
    """The failed cells: which, why, and the tail of the server's log."""
    return [
        {
            "cell": f"{row['target']} / {row['server']} / {row['workload']}-{row['load']}, repeat {row['repeat']}",
            "reason": row["reason"] or "no reason recorded",
            "log_tail": row["log_tail"] or "",
        }
        for _, row in cells[cells["status"] != "ok"].iterrows()
    ]


def hosts(runs: pd.DataFrame) -> Listing:
    """The machines as each run found them."""
    names = ["target", "host_name", "cpu_model", "cpu_cores", "gpu_count", "gpu_model", "driver", "kernel", "host_key"]
    heads = ("Target", "Host", "CPU", "Cores", "GPUs", "GPU model", "Driver", "Kernel", "Host key")
    return _listing("Hosts", heads, runs[names])


def servers(cells: pd.DataFrame) -> Listing:
    """What was launched: environments, models and drafters by revision, flags."""
    names = [
        "server",
        "engine",
        "environment",
        "model",
        "model_revision",
        "drafter",
        "drafter_revision",
        "tensor_parallel",
        "expert_parallel",
        "max_running_requests",
        "flags",
    ]
    heads = (
        "Server",
        "Engine",
        "Environment",
        "Model",
        "Revision",
        "Drafter",
        "Revision",
        "TP",
        "EP",
        "Max requests",
        "Flags",
    )
    return _listing("Servers", heads, cells[names])


def starts(runs: pd.DataFrame) -> Listing:
    """What the servers said of themselves, and how many starts there were."""
    names = ["server", "engine_version", "numerics", "bit_exact", "threads"]
    grouped = (
        runs.groupby(names, dropna=False, sort=False)
        .agg(starts=("start_id", "count"), ready=("ready_s", "median"))
        .reset_index()
    )
    grouped["ready"] = grouped["ready"].map(lambda seconds: DASH if seconds != seconds else f"{seconds:.1f}")
    heads = ("Server", "Version", "Numerics", "Bit-exact", "Threads", "Starts", "Ready after (s, median)")
    return _listing("Server starts", heads, grouped)


def plan_keys(cells: pd.DataFrame) -> Listing:
    """The plan key, host key and attempt of every cell."""
    frame = cells[["target", "server", "workload", "load", "repeat", "status", "attempt", "block", "plan_key"]]
    return _listing(
        "Cells", ("Target", "Server", "Workload", "Load", "Repeat", "Status", "Attempt", "Block", "Plan key"), frame
    )


def _listing(title: str, heads: tuple[str, ...], frame: pd.DataFrame) -> Listing:
    distinct = frame.drop_duplicates()
    rows = tuple(tuple(_shown(value) for value in row) for row in distinct.itertuples(index=False, name=None))
    return Listing(title, heads, rows)


def _shown(value: Any) -> str:
    if value is None or value is pd.NA or value != value:
        return DASH
    text = str(value)
    return text[:12] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text
