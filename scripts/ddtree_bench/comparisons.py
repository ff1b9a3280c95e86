"""Configurations against their baselines: the rows of the speed-up table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ddtree_bench import columns, stats
from ddtree_bench.identical_answers import Answers, against_ar

BASELINES = ("AR", "DFLASH")
CONFIGURATION = (*columns.SERVER, *columns.WORK)
"""What the runs of one configuration share: everything but the repeat."""
NOT_JOINED = ("server", "verify_width", "workload", "load")
"""Labels and derived columns; their content is compared through other columns."""
GROUP = ("target", "engine", "model", "tensor_parallel", "expert_parallel", "workload", "load")
"""Where a configuration looks for its baseline."""
PLACE = ("target", "machine_key", "workload", "load")
"""Where a server's label names one configuration, but for another drafter under the same name."""
FACTORS = ("accept_length_factor", "step_time_factor", "residual_factor")


@dataclass(frozen=True)
class Named:
    """A comparison that was named before measuring: a method (with its budget) against a baseline, at a load.

    A concurrency names closed loops, a rate open ones.
    """

    method: str
    baseline: str
    budget: int | None = None
    topk_cap: int | None = None
    concurrency: int | None = None
    rate: float | None = None

    def covers(self, row: Mapping[str, Any], baseline: str) -> bool:
        """Whether `row`, a configuration, against `baseline` is this comparison; None matches any value."""
        if self.method != row["method"] or self.baseline != baseline:
            return False
        if self.concurrency is not None and self.rate is None and row["load_kind"] != "closed":
            return False
        wanted = {name: getattr(self, name) for name in ("budget", "topk_cap", "concurrency", "rate")}
        return all(value is None or value == row[name] for name, value in wanted.items())


def configurations(cells: pd.DataFrame) -> list[pd.DataFrame]:
    """The cells table cut into configurations (all repeats of the same server, workload and load), in table order."""
    return [group for _, group in cells.groupby(list(CONFIGURATION), dropna=False, sort=False)]


def succeeded(cells: pd.DataFrame) -> pd.DataFrame:
    """The rows whose cell has a throughput; single requests of it may have failed."""
    return cells[(cells["status"] == "ok") & (cells["throughput_full_tok_s"] > 0)]


def complete(cells: pd.DataFrame) -> pd.DataFrame:
    """The rows of `succeeded` in which every request succeeded."""
    good = succeeded(cells)
    return good[good["requests_ok"] == good["requests"]]


def n_starts(cells: pd.DataFrame) -> int:
    """Count the server starts behind cells of one configuration: repeats on one running server are one run."""
    return int(cells["start_id"].nunique(dropna=False))


def over_starts(cells: pd.DataFrame, values: pd.Series) -> stats.Interval:
    """Mean of a configuration over server starts, with its interval.

    Parameters
    ----------
    cells : DataFrame, n rows
        Rows of the cells table, of one configuration.
    values : Series, shape (n,)
        A value a cell, NaN for none. Those of one start count as one run, their mean: between repeats on one running
        server nothing of what differs between starts can be seen.
    """
    return stats.mean_interval(values.astype(float).groupby(cells["start_id"].to_numpy(), dropna=False).mean())


def window_of(*frames: pd.DataFrame) -> str:
    """`steady` when every cell of the frames has a steady window long enough to be used, else `full`."""
    return "steady" if all((frame["throughput_window"] == "steady").all() for frame in frames) else "full"


def speedup_rows(
    cells: pd.DataFrame, named: Sequence[Named] = (), answers: Answers | None = None
) -> list[dict[str, Any]]:
    """One row for each configuration and baseline method: DFLASH and DDTREE against AR, DDTREE against DFLASH.

    With `answers`, rows against AR also say whether the texts are AR's.
    """
    rows = []
    for _, group in cells.groupby(list(GROUP), dropna=False, sort=False):
        members = configurations(group)
        for member in members:
            method = member["method"].iloc[0]
            for baseline in BASELINES[: {"AR": 0, "DFLASH": 1}.get(method, 2)]:
                row = _speedup_row(member, members, baseline, answers)
                rows.append(row | {"named": any(claim.covers(row, baseline) for claim in named)})
    _correct(rows)
    return rows


def _correct(rows: Sequence[dict[str, Any]]) -> None:
    family = [row for row in rows if row["named"]]
    for row, p_value in zip(family, stats.holm([row.get("p_value", np.nan) for row in family]), strict=True):
        row["p_holm"] = float(p_value)


def _speedup_row(
    member: pd.DataFrame, members: Sequence[pd.DataFrame], baseline: str, answers: Answers | None
) -> dict[str, Any]:
    row = {**configuration_of(member), "baseline": baseline}
    candidates = [other for other in members if other["method"].iloc[0] == baseline]
    if not candidates:
        return row | {"comparison": "no_baseline", "reason": f"no {baseline} cell in this target, workload and load"}
    try:
        base = find_baseline(member, candidates)
    except stats.UnlikeCells as refusal:
        return row | {"comparison": "refused", "reason": str(refusal)}
    row["baseline_server"] = base["server"].iloc[0]
    ours, theirs = succeeded(member), succeeded(base)
    if ours.empty or theirs.empty:
        side = row["server"] if ours.empty else row["baseline_server"]
        return row | {"comparison": "no_runs", "reason": f"no run of {side} succeeded"}
    if baseline == "AR" and answers is not None:
        row |= against_ar(answers, ours, theirs)
    return row | _compared(ours, theirs)


def configuration_of(member: pd.DataFrame) -> dict[str, Any]:
    """The values of `CONFIGURATION` that the cells of one configuration share; None for "has none"."""
    return {name: _plain(member[name].iloc[0]) for name in CONFIGURATION}


def _plain(value: Any) -> Any:
    return None if value is None or value is pd.NA or value != value else value


def join_keys(member: pd.DataFrame) -> dict[str, Any]:
    """What must agree with a baseline, as it was planned: everything but the repeat, labels and derived columns."""
    return {name: value for name, value in configuration_of(member).items() if name not in NOT_JOINED}


def _read_back(member: pd.DataFrame) -> dict[str, Any]:
    """What the servers of the runs that succeeded said of themselves; {} when none did.

    Raises stats.UnlikeCells when the runs of this one configuration disagree.
    """
    good = succeeded(member)
    if good.empty:
        return {}
    found = {name: list(dict.fromkeys(_plain(value) for value in good[name])) for name in columns.READ_BACK}
    if mixed := {name: values for name, values in found.items() if len(values) > 1}:
        parts = ", ".join(f"{name} is {' and '.join(map(str, values))}" for name, values in mixed.items())
        raise stats.UnlikeCells(
            tuple(mixed), f"no ratio of unlike cells: in the runs of {good['server'].iloc[0]} {parts}"
        )
    return {name: values[0] for name, values in found.items()}


def find_baseline(member: pd.DataFrame, candidates: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The candidate that agrees with `member` in all that a ratio needs: as planned, and as the servers read back.

    Raises stats.UnlikeCells, naming the keys that differ from the closest candidate when there is none, and the
    candidates when there are several.
    """
    ours = join_keys(member)
    differing = [len(stats.differing_keys(ours, join_keys(other))) for other in candidates]
    closest = candidates[int(np.argmin(differing))]
    stats.require_like(ours, join_keys(closest))
    if differing.count(0) > 1:
        equal = [str(other["server"].iloc[0]) for other, n in zip(candidates, differing, strict=True) if not n]
        raise stats.UnlikeCells(("server",), f"several baselines are alike: {', '.join(equal)}; keep one of them")
    left, right = _read_back(member), _read_back(closest)
    if left and right:
        stats.require_like(left, right)
    return closest


def factors(ours: pd.DataFrame, theirs: pd.DataFrame, window: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Values whose ratios are the speed-up and its factors, a row a run on both sides.

    ``throughput ratio = accept length ratio x (their step time / our round time) x residual``; the residual is what
    is left, so the identity is exact for each pair and for geometric means. AR commits one token a step.

    Returns
    -------
    (DataFrame, DataFrame)
        Columns `speedup` (tokens/s), `accept_length_factor` (tokens/round), `step_time_factor` (rounds/s) and
        `residual_factor` (dimensionless): NaN where the engine reports no rounds.
    """
    sides = []
    for side in (ours, theirs):
        speed = side[f"throughput_{window}_tok_s"].astype(float)
        length = side["accept_length"].astype(float).where(side["method"] != "AR", 1.0)
        pace = 1.0 / side["round_time_s"].astype(float)
        sides.append(
            pd.DataFrame(
                {
                    "speedup": speed,
                    "accept_length_factor": length,
                    "step_time_factor": pace,
                    "residual_factor": speed / (length * pace),
                }
            )
        )
    return sides[0], sides[1]


def choose_pairs(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """The runs of both sides that a ratio stands on, and whether they are paired row by row.

    Pairs of one block are used when there are enough of them for an interval, or when no run lacks a partner;
    otherwise all runs are used unpaired.
    """
    keys = [set(zip(side["repeat"], side["block"], strict=True)) for side in (ours, theirs)]
    shared = keys[0] & keys[1]
    across = set(ours["repeat"]) & set(theirs["repeat"]) - {repeat for repeat, _ in shared}
    if len(shared) < stats.MIN_REPEATS and (across or not shared):
        return ours.reset_index(drop=True), theirs.reset_index(drop=True), False
    ours, theirs = (
        side[[key in shared for key in zip(side["repeat"], side["block"], strict=True)]].sort_values("repeat")
        for side in (ours, theirs)
    )
    return ours.reset_index(drop=True), theirs.reset_index(drop=True), True


def _unequal_work(ours: pd.DataFrame, theirs: pd.DataFrame, paired: bool) -> str | None:
    """Why the two sides did not do the same work: requests that failed leave other prompts behind."""
    left, right = list(ours["answered_sha256"]), list(theirs["answered_sha256"])
    if left == right if paired else len({*left, *right}) == 1:
        return None
    counts = [
        f"{side['requests_ok'].sum()} of {side['requests'].sum()} requests of {side['server'].iloc[0]}"
        for side in (ours, theirs)
    ]
    return f"not the same prompts were answered: {counts[0]} succeeded against {counts[1]}"


def _compared(ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, Any]:
    total = len(ours)
    ours, theirs, paired = choose_pairs(ours, theirs)
    if reason := _unequal_work(ours, theirs, paired):
        return {"comparison": "unequal_work", "reason": reason}
    window = window_of(ours, theirs)
    left, right = factors(ours, theirs, window)
    row: dict[str, Any] = {
        "comparison": "ok",
        "pairing": "paired" if paired else "unpaired",
        "n": len(ours),
        "n_baseline": len(theirs),
        "n_left_out": total - len(ours),
        "window": window,
        "throughput_tok_s": float(left["speedup"].mean()),
        "baseline_throughput_tok_s": float(right["speedup"].mean()),
    }
    ratio = stats.paired_ratio if paired else stats.welch_ratio
    for name in ("speedup", *FACTORS):
        if left[name].isna().any() or right[name].isna().any():
            continue
        interval = ratio(left[name], right[name])
        row |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
        if name == "speedup":
            row["p_value"] = interval.p_value
            row["detectable_effect"] = _detectable(left[name], right[name], paired)
    return row


def _detectable(left: pd.Series, right: pd.Series, paired: bool) -> float:
    n = min(len(left), len(right))
    if n < stats.MIN_REPEATS:
        return float("nan")
    if paired:
        variance = float((np.log(left) - np.log(right)).var(ddof=1)) / 2
    else:
        variance = float(np.log(left).var(ddof=1) + np.log(right).var(ddof=1)) / 2
    return stats.least_detectable_effect(variance**0.5, n) if variance > 0 else 0.0


def run_ratios(cells: pd.DataFrame, row: Mapping[str, Any]) -> pd.DataFrame:
    """The single pairs behind a row of the speed-up table.

    Parameters
    ----------
    cells : DataFrame
        The cells table.
    row : mapping
        A row of the speed-up table.

    Returns
    -------
    DataFrame
        Columns `repeat`, `speedup` and the `FACTORS`, a row a pair; empty when the row is unpaired or has no ratio.
    """
    names = ["speedup", *FACTORS]
    if row["pairing"] != "paired":
        return pd.DataFrame(columns=["repeat", *names])
    here = succeeded(cells[(cells[list(PLACE)] == [row[name] for name in PLACE]).all(axis=1)])
    ours = here[(here["server"] == row["server"]) & (here["host_key"] == row["host_key"])]
    ours, theirs, _ = choose_pairs(ours, here[here["server"] == row["baseline_server"]])
    left, right = factors(ours, theirs, str(row["window"]))
    ratios = left / right
    ratios.insert(0, "repeat", ours["repeat"])
    return ratios
