"""What figures share when they read tables: panels, names and looks of configurations, notes on failures, marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ddtree_bench.columns import ALONG
from ddtree_bench.comparisons import CONFIGURATION, succeeded
from ddtree_bench.figures.style import METHODS, Stroke, strokes

SETTING = ("target", "engine", "model", "tensor_parallel", "expert_parallel")
PANEL = (*SETTING, "workload", "load")
REASON_LENGTH = 110
LABELS = ("server",)
"""Columns that are names themselves."""
APART = " · "

ROUND_TRIP_SHARE = 0.1
"""The share of the median TTFT above which the median round trip to the server is worth a mark."""

NOT_MEASURED: Mapping[str, str] = {"failed": "failed", "aborted": "broken off"}
"""The statuses of cells that enter no ratio, in words."""

MARKED_ITSELF: Mapping[str, str] = {
    "complete": "requests succeeded",
    "tokens_agree": "the server's count",
    "admitted": "requests ran at once",
    "steady_window": "no steady window",
    "identity": "tokens are not",
    "tree_branches": "",
    "prompts_repeated": "prompts used more than once",
    "cached_prompts": "from the prefix cache",
}
"""Checks whose subject has a mark of its own, and the words of it; that of chains is left out where they are meant."""

CHECK_MARKS: Mapping[str, str] = {
    "tokens_known": "output tokens are not known: no usage, no tokenizer",
    "delivered_load": "other numbers of requests on the server than in flight at the client",
    "method": "the server's rounds are not those of the method",
    "peak": "the peak is below what the mean allows",
    "lengths": "answers longer than max_tokens, or ended by length before it",
    "client_healthy": "the client itself was too slow: its numbers may be off",
}
"""What a failed check means to a reader. A check that has neither form is named as it is."""


def panels(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The frame cut by target, engine, model, parallelism, workload and load, with a title of what tells them apart.

    Each part has a further column `configuration`: the name that figures give to a configuration.
    """
    for title, group in _cut(frame, PANEL):
        yield f"{title}{APART}{load_of(group.iloc[0])}", group.assign(configuration=_names(group))


def along_concurrency(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The closed loops cut as by `panels`, all together: a configuration has one name at every concurrency."""
    closed = frame[frame["load_kind"] == "closed"] if "load_kind" in frame else frame
    for title, group in _cut(closed, PANEL[:-1]):
        yield title, group.assign(configuration=_names(group, ALONG))


def load_of(row: Mapping[str, Any]) -> str:
    """A load in a phrase: requests in flight, or how many arrive a second."""
    if row["load_kind"] == "closed":
        return f"C = {row['concurrency']}"
    return f"{row['rate']:g} requests/s ({row['arrivals']}, at most {row['concurrency']} in flight)"


def _cut(frame: pd.DataFrame, by: tuple[str, ...]) -> Iterator[tuple[str, pd.DataFrame]]:
    varying = [name for name in SETTING[1:] if frame[name].nunique() > 1]
    for key, group in frame.groupby(list(by), dropna=False, sort=True):
        values = dict(zip(by, key, strict=True))
        settings = [_setting(name, values[name]) for name in varying]
        yield APART.join([str(values["target"]), *settings, str(values["workload"])]), group.reset_index(drop=True)


def _setting(name: str, value: Any) -> str:
    return {"tensor_parallel": f"TP{value}", "expert_parallel": f"EP{value}"}.get(name, str(value))


def _names(group: pd.DataFrame, free: Sequence[str] = ()) -> pd.Series:
    """Names of configurations; where the method's own parameters do not tell two apart, with what does.

    Values in the columns `free` may differ within a configuration.
    """
    plain = group.apply(name_of, axis=1)
    full = group[[column for column in CONFIGURATION if column not in free]].astype(str)
    names = plain.copy()
    for name in plain.unique():
        same = full[plain == name]
        varying = [column for column in same.columns if same[column].nunique() > 1 and column not in LABELS]
        if varying:
            names[same.index] = [
                f"{name}{APART}" + ", ".join(f"{c}={row[c][:12]}" for c in varying) for _, row in same.iterrows()
            ]
    return names


def broken(name: str) -> str:
    """A configuration's name over as many lines as it has parts: method and budget stand whole in the first."""
    return name.replace(APART, "\n").replace(", ", "\n")


def name_of(row: Mapping[str, Any]) -> str:
    """A configuration's name by its method and the method's parameters: AR, DFlash block 8, DDTree B=16 K=8."""
    look = METHODS[row["method"]].label
    if row["method"] == "DDTREE":
        return f"{look} B={row['budget']} K={row['topk_cap']}"
    return f"{look} block {row['block_size']}" if row["method"] == "DFLASH" else look


def in_order(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The frame cut into configurations in reading order: AR, DFLASH, then DDTREE by budget and cap."""
    rank = {method: position for position, method in enumerate(METHODS)}
    ordered = frame.assign(_rank=frame["method"].map(rank)).sort_values(
        ["_rank", "block_size", "budget", "topk_cap", "server"], kind="stable", na_position="first"
    )
    groups = ordered.drop(columns="_rank").groupby(list(CONFIGURATION), dropna=False, sort=False)
    return [group for _, group in groups]


def looks(parts: Sequence[pd.DataFrame]) -> dict[str, Stroke]:
    """Stroke of each configuration of all parts, the same in every panel: darker with a larger budget.

    `parts` have the column `configuration`; the order is that of reading.
    """
    found: dict[str, Stroke] = {}
    for method in METHODS:
        sizes: dict[str, tuple[int, int]] = {}
        for part in parts:
            for group in in_order(part[part["method"] == method]):
                first = group.iloc[0]
                sizes[first["configuration"]] = _size(first)
        ordered = sorted(sizes, key=lambda name: (sizes[name], name))
        found |= zip(ordered, strokes(method, len(ordered)), strict=True)
    return found


def _size(row: Mapping[str, Any]) -> tuple[int, int]:
    if row["method"] == "DDTREE":
        return int(row["budget"]), int(row["topk_cap"])
    return (int(row["block_size"]) if row["method"] == "DFLASH" else 0), 0


def failures(cells: pd.DataFrame, where: str = "") -> list[str]:
    """A note for each configuration with cells that failed or were broken off: how many of how many, and why."""
    notes = []
    for group in in_order(cells):
        for status, words in NOT_MEASURED.items():
            lost = group[group["status"] == status]
            if lost.empty:
                continue
            reasons = [str(reason) for reason in dict.fromkeys(lost["reason"].fillna("no reason recorded"))]
            text = "; ".join(shortened(reason) for reason in reasons)
            place = f"{where}: " if where else ""
            notes.append(f"× {place}{group['configuration'].iloc[0]}: {len(lost)} of {len(group)} runs {words}: {text}")
    return notes


def shortened(reason: str) -> str:
    """A reason that fits into a note."""
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 1] + "…"


def failed_of(cells: pd.DataFrame) -> str:
    """`1/4` for a configuration with runs that failed or were broken off, "" without."""
    failed = int((cells["status"] != "ok").sum())
    return f"{failed}/{len(cells)}" if failed else ""


def marks_of(cells: pd.DataFrame) -> list[str]:
    """What a reader must know of one configuration's cells before believing its numbers, each in a phrase."""
    good = succeeded(cells)
    if good.empty:
        return []
    answered, sent = int(good["requests_ok"].sum()), int(good["requests"].sum())
    unequal, cached = int(good["identity_broken"].sum()), int(good["cached_prompt_tokens"].sum())
    sought, ran = int(good["concurrency"].max()), good["server_running_max"].max()
    closed = bool((good["load_kind"] == "closed").all())
    found = {
        f"only {answered} of {sent} requests succeeded": answered < sent,
        f"tokens are not 1 + rounds + accepted drafts in {unequal} requests": unequal > 0,
        # Budget 1 and cap 1 are chains by construction.
        "no tree branched: a chain": _any(good["tree_is_chain"]) and good[["budget", "topk_cap"]].iloc[0].min() > 1,
        f"{cached} prompt tokens from the prefix cache": cached > 0,
        "no steady window to use: full window": (good["throughput_window"] != "steady").any(),
        f"at most {ran} of {sought} requests ran at once, by the server's samples": closed
        and pd.notna(ran)
        and ran < sought,
        "prompts used more than once": _any(good["repeat_prompts"]),
        "text after its end (ignore_eos), which inflates the accept length": _any(good["ignore_eos"]),
        "tokens differ from the server's count by more than 1 %": _any(good["counter_mismatch"]),
        "the way to the server is in the latencies: a round trip takes more than 10 % of TTFT": (
            good["link_round_trip_p50_s"] > ROUND_TRIP_SHARE * good["ttft_p50_s"]
        ).any(),
    }
    shown = [text for text, applies in found.items() if applies]
    return shown + _of_checks(good, shown) + _of_endpoint(good)


def _of_checks(good: pd.DataFrame, shown: Sequence[str]) -> list[str]:
    """A mark for each failed check that none of the marks `shown` stands for."""
    failed = _words(good["checks_failed"])
    unsaid = [name for name in failed if not any(MARKED_ITSELF.get(name, APART) in text for text in (*shown, ""))]
    return [CHECK_MARKS.get(name, f"check failed: {name}") for name in unsaid]


def _of_endpoint(good: pd.DataFrame) -> list[str]:
    """What is not as with a server that was started for the run."""
    silent = _words(good["not_confirmed"])
    found = [f"launch configuration not confirmed: {', '.join(silent)}"] if silent else []
    return found + (["prefix cache not emptied"] if good["cache_not_flushed"].notna().any() else [])


def _words(values: pd.Series) -> list[str]:
    """The distinct words of a column of lists with a blank between."""
    return list(dict.fromkeys(word for value in values.dropna() for word in str(value).split()))


def _any(values: pd.Series) -> bool:
    return bool(values.fillna(False).astype(bool).any())


def marks(groups: Sequence[tuple[str, pd.DataFrame]]) -> list[str]:
    """Notes with the marks of all panels' configurations: the mark, and whom it concerns."""
    concerned: dict[str, dict[str, list[str]]] = {}
    for title, panel in groups:
        for group in in_order(panel):
            for text in marks_of(group):
                concerned.setdefault(text, {}).setdefault(title, []).append(str(group["configuration"].iloc[0]))
    everybody = {
        title: [str(group["configuration"].iloc[0]) for group in in_order(panel) if len(succeeded(group))]
        for title, panel in groups
    }
    return [f"! {text}: {_whom(panels_of, everybody)}." for text, panels_of in concerned.items()]


def _whom(concerned: Mapping[str, list[str]], everybody: Mapping[str, list[str]]) -> str:
    if concerned == {title: names for title, names in everybody.items() if names}:
        return "all configurations"
    parts = [
        (f"{title}: " if len(everybody) > 1 else "") + ("all" if names == everybody[title] else ", ".join(names))
        for title, names in concerned.items()
    ]
    return "; ".join(parts)
