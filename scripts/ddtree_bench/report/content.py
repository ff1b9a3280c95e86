"""What the report shows of the tables, as plain rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ddtree_bench.budgets import SWEEP
from ddtree_bench.figures.facets import NOT_MEASURED, in_order, load_of, marks_of, name_of, panels
from ddtree_bench.figures.style import n_of, number, starts_of
from ddtree_bench.plan import EXTERNAL
from ddtree_bench.stats import MIN_CLAIM

DASH = "–"
LEAST_P = 0.0001
"""Smaller p-values are said to be below it."""
NO_RATIO: Mapping[str, str] = {"no_baseline": "no baseline", "no_runs": "no run"}
"""Why there is no ratio, where that is short to say; of unlike cells the keys that differ are named."""


@dataclass(frozen=True)
class Listing:
    """A table of text: a title, the heads of its columns, its rows, and what is to be said below it.

    A value may have several lines.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def summary(tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """What was measured, where, when and how often, each in a phrase."""
    cells, runs = tables["cells"], tables["runs"]
    if cells.empty:
        return {"Cells": "none measured yet"}
    panel_names = [name_of(group.iloc[0]) for group in in_order(cells)]
    hosts = {f"{row['target']} ({_machine(row)})" for _, row in runs.iterrows()} or set(cells["target"])
    return {
        "Measured": ", ".join(dict.fromkeys(panel_names)),
        "Model": "; ".join(_distinct(cells, ("model", "model_revision"))),
        "Work": "; ".join(_work(cells)),
        "Where": "; ".join(sorted(hosts)),
        "When": f"{_minute(cells['started_at'].min())} to {_minute(cells['ended_at'].max())}",
        "Cells": _counted(cells),
        "Runs": f"{n_of(list(tables['budget']['n']))} ({starts_of([cells])}) for each configuration",
    }


def _counted(cells: pd.DataFrame) -> str:
    measured = f"{(cells['status'] == 'ok').sum()} measured"
    return f"{measured}, {lost}" if (lost := _lost(cells)) else measured


def _distinct(frame: pd.DataFrame, names: tuple[str, ...]) -> list[str]:
    rows = frame[list(names)].drop_duplicates().itertuples(index=False)
    return [" @ ".join(str(value) for value in row) for row in rows]


def _work(cells: pd.DataFrame) -> list[str]:
    phrase = "{workload}: {n_prompts} prompts, up to {max_tokens} tokens, temperature {temperature:g}, {load_in_words}"
    names = ["workload", "n_prompts", "max_tokens", "temperature", "load_kind", "concurrency", "rate", "arrivals"]
    rows = cells[names].drop_duplicates().to_dict("records")
    return [phrase.format(**row, load_in_words=load_of(row)) for row in rows]


def _minute(stamp: Any) -> str:
    return str(stamp)[:16].replace("T", " ")


def _machine(row: Mapping[str, Any]) -> str:
    if row["environment"] == EXTERNAL:
        return "an external endpoint, machine not known"
    gpus = f"{row['gpu_count']} × {row['gpu_model']}, " if row["gpu_model"] else ""
    return f"{gpus}{row['cpu_model']}, {row['cpu_cores']} cores"


ANSWER = (
    "Configuration",
    "n",
    "Tokens/s",
    "Over AR",
    "Over DFlash",
    "Outputs = AR",
    "Accept length, pooled",
    "Round time (ms)",
    "Marks",
)


def answers(tables: Mapping[str, pd.DataFrame]) -> list[Listing]:
    """The answer: for each target, workload and concurrency a row a configuration, and the best budget."""
    cells = dict(panels(tables["cells"]))
    ratios = dict(panels(tables["speedup"])) if len(tables["speedup"]) else {}
    listings = []
    for title, panel in panels(tables["budget"]):
        mine = ratios.get(title, tables["speedup"].iloc[:0].assign(configuration=None))
        rows = tuple(_answer(group.iloc[0], mine, cells[title]) for group in in_order(panel))
        listings.append(Listing(title, ANSWER, rows, tuple(best_budgets(panel))))
    return listings


def _answer(row: pd.Series, ratios: pd.DataFrame, cells: pd.DataFrame) -> tuple[str, ...]:
    mine = ratios[ratios["configuration"] == row["configuration"]]
    length = ranged(row["accept_length"], row["accept_length_low"], row["accept_length_high"], break_at="\n")
    milliseconds = [1000 * row[name] for name in ("round_time_s", "round_time_low_s", "round_time_high_s")]
    return (
        row["configuration"],
        _count(row, cells[cells["configuration"] == row["configuration"]]),
        ranged(*(row[f"throughput{end}_tok_s"] for end in ("", "_low", "_high")), break_at="\n"),
        *(_ratio(row, mine[mine["baseline"] == baseline], baseline) for baseline in ("AR", "DFLASH")),
        _identical(row, mine[mine["baseline"] == "AR"]),
        "1" if row["method"] == "AR" else length,
        ranged(*milliseconds, break_at="\n"),
        "\n".join(f"! {mark}" for mark in marks_of(cells[cells["configuration"] == row["configuration"]])) or DASH,
    )


def _lost(cells: pd.DataFrame) -> str:
    counts = cells["status"].value_counts()
    return ", ".join(f"{counts[status]} {words}" for status, words in NOT_MEASURED.items() if status in counts)


def _count(row: pd.Series, cells: pd.DataFrame) -> str:
    """The runs, how many failed or were broken off, and the requests of the others when not all succeeded."""
    text = str(row["n"]) + (f" ({_lost(cells)})" if row["n_failed"] else "")
    text += f"\n{row['n_repeats']} repeats" if row["n_repeats"] > row["n"] else ""
    return text if row["requests_ok"] == row["requests"] else f"{text}\n{row['requests_ok']}/{row['requests']} requests"


def _ratio(row: pd.Series, found: pd.DataFrame, baseline: str) -> str:
    if row["method"] == baseline:
        return "baseline"
    if found.empty:
        return DASH
    ratio = found.iloc[0]
    if ratio["comparison"] != "ok":
        return NO_RATIO.get(ratio["comparison"]) or str(ratio["reason"])
    mark = " (unpaired)" if ratio["pairing"] == "unpaired" else ""
    return f"{ranged(ratio['speedup'], ratio['speedup_low'], ratio['speedup_high'], unit='×')}{mark}\n{standing(ratio)}"


def standing(ratio: Mapping[str, Any]) -> str:
    """What a ratio may be taken for: named beforehand, with its corrected p-value, or exploratory; few runs: no claim.

    >>> standing({"n": 5, "n_baseline": 5, "named": True, "p_holm": 0.0123})
    'named\\np (Holm) = 0.012'
    """
    n = min(ratio["n"], ratio["n_baseline"])
    lines = ["named" if ratio["named"] else "exploratory"]
    if ratio["named"] and not pd.isna(ratio["p_holm"]):
        p_value = ratio["p_holm"]
        lines.append(f"p (Holm) = {p_value:.2g}" if p_value >= LEAST_P else f"p (Holm) < {LEAST_P}")
    if n < MIN_CLAIM:
        lines.append(f"no claim (n = {n} < {MIN_CLAIM})")
    return "\n".join(lines)


def _identical(row: pd.Series, found: pd.DataFrame) -> str:
    """`11/12`: prompts whose greedy answer is AR's, of all that both answered, and from where on one differs."""
    if row["method"] == "AR":
        return "baseline"
    if found.empty or pd.isna(found.iloc[0]["prompts_compared"]):
        return DASH
    ratio = found.iloc[0]
    n = int(ratio["prompts_compared"])
    text = f"{round(ratio['identical_share'] * n)}/{n}"
    where = ratio["first_divergence"]
    return text if pd.isna(where) else f"{text}\nfrom character {where}"


def best_budgets(panel: pd.DataFrame) -> list[str]:
    """A line a sweep of a panel of the budget table: its best budget, chosen without the repeat it is scored on."""
    lines = []
    chosen = panel[panel["chosen_repeats"].fillna(0) > 0]
    for _, sweep in chosen.groupby(list(SWEEP), dropna=False, sort=False):
        budgets = sweep.sort_values("chosen_repeats", ascending=False, kind="stable").to_dict("records")
        total = sum(row["chosen_repeats"] for row in budgets)
        names = ", ".join(
            f"B = {row['budget']} K = {row['topk_cap']} ({row['chosen_repeats']} of {total} repeats)" for row in budgets
        )
        first = budgets[0]
        bounds = (first["chosen_over_ar"], first["chosen_over_ar_low"], first["chosen_over_ar_high"])
        if pd.isna(bounds[0]):
            score = "no ratio to AR"
        else:
            score = f"{ranged(*bounds, unit='×')} over AR, n = {n_pairs(first['chosen_n'])}"
        failed = sum(row["chosen_failed"] for row in budgets)
        lost = f"; failed in {failed} of {total} repeats, which have no score" if failed else ""
        lines.append(f"Best budget, chosen without the repeat it is scored on: {names}; {score}{lost}.")
    return lines


def n_pairs(n: int) -> str:
    """`3 pairs`."""
    return f"{n} pair{'' if n == 1 else 's'}"


def ranged(estimate: float, low: float, high: float, *, unit: str = "", break_at: str = " ") -> str:
    """`2.26× [2.18, 2.34]`, `break_at` before the bounds; none where there are none, a dash without an estimate."""
    if estimate != estimate:
        return DASH
    text = f"{number(estimate)}{unit}"
    return text if low != low else f"{text}{break_at}[{number(low)}, {number(high)}]"


def failures(cells: pd.DataFrame) -> list[dict[str, str]]:
    """The cells that failed or were broken off: which, why, and the tail of the server's log."""
    return [
        {
            "cell": f"{row['target']} / {row['server']} / {row['workload']}-{row['load']}, repeat {row['repeat']}",
            "reason": f"{NOT_MEASURED[row['status']]}: {row['reason'] or 'no reason recorded'}",
            "log_tail": row["log_tail"] or "",
        }
        for _, row in cells[cells["status"] != "ok"].iterrows()
    ]


def hosts(runs: pd.DataFrame) -> Listing:
    """The machines as the runs found them: a line a machine key, with the host keys of its model pairs."""
    names = ["target", "host_name", "cpu_model", "cpu_cores", "gpu_count", "gpu_model", "driver", "kernel"]
    heads = ("Target", "Host", "CPU", "Cores", "GPUs", "GPU model", "Driver", "Kernel", "Machine key", "Host keys")
    rows = tuple(
        tuple(_shown_all(machine[name]) for name in (*names, "machine_key", "host_key"))
        for _, machine in runs.groupby("machine_key", dropna=False, sort=False)
    )
    note = "Machine key: hardware, driver and the model's content. Host key: the same and the drafter's content."
    return Listing("Hosts", heads, rows, (note,))


def commits(cells: pd.DataFrame) -> tuple[str, ...]:
    """The commits that the cells were measured at, in the order of the table; none when it does not hold them."""
    return tuple(cells["commit"].dropna().drop_duplicates()) if "commit" in cells else ()


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


def _shown_all(values: pd.Series) -> str:
    """The distinct values of a column, as a list."""
    return ", ".join(dict.fromkeys(_shown(value) for value in values))


def _shown(value: Any) -> str:
    if value is None or value is pd.NA or value != value:
        return DASH
    text = str(value)
    return text[:12] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text
