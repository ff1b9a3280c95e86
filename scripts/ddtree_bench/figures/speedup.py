"""Speed-up explained: the ratio of throughputs to AR's beside the three factors whose product it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from ddtree_bench.comparisons import FACTORS, run_ratios
from ddtree_bench.figures import style
from ddtree_bench.figures.facets import broken, failures, in_order, marks, panels

TITLE = "Speed-up over AR, explained"
CAPTION = (
    "Throughput of each configuration over that of AR, and the three factors whose product it is: tokens committed a "
    "round (accept length, pooled: the cut at the end of answers included), AR's step time over the round time, and "
    "the residual (prefill, queueing, the client). Speculation pays when rounds cost less extra time than they bring "
    "tokens. Large marks are geometric means over pairs of runs of one repeat and block; the pale bar runs from 1 to "
    "the mean, the dark bar with caps is the 95 % t-interval of the log-ratio; small marks are single pairs; the "
    "vertical line at 1 is AR. Throughput itself stands at the right. A dagger marks ratios of runs that were not "
    "measured in one block: unpaired, wider, and open to whatever changed in between. A red cross with n/m says that n "
    "of m runs failed; a filled one, that none succeeded."
)
QUANTITIES = ("speedup", *FACTORS)
HEADS = ("Speed-up over AR", "Accept length,\npooled\n(tokens/round)", "AR step time /\nround time", "Residual")
SIGNS = ("=", "×", "×")
RIGHT, RIGHT_FAILED, GAP = 0.90, 1.22, 0.26
LABEL_SIZE, LABEL_PAD, LABEL_LINE = 7.0, 0.14, 0.118
SHARES = (1.5, 1.0, 1.0, 1.0)
RATIO_AT, SPEED_AT = 26, 59
"""Right edges of the two columns of numbers, points from the last panel."""
LINE, TOP, HEAD, X_LABEL = 0.21, 0.02, 0.62, 0.30
DRAWN = [
    "panel",
    "method",
    "configuration",
    "quantity",
    "unit",
    "kind",
    "repeat",
    "value",
    "low",
    "high",
    "n",
    "n_baseline",
    "pairing",
    "reason",
]


def draw(tables: dict[str, pd.DataFrame], stem: Path) -> list[Path]:
    """Draw the figure from the tables `cells`, `speedup` and `budget`; returns the paths written."""
    with style.look():
        groups = list(panels(tables["budget"]))
        cells = dict(panels(tables["cells"]))
        ratios = tables["speedup"][tables["speedup"]["baseline"] == "AR"]
        by_panel = dict(panels(ratios)) if len(ratios) else {}
        notes = style.wrap_notes(_notes(groups, cells, ratios), style.DOUBLE_COLUMN)
        heights = [_tall(panel) for _, panel in groups]
        height = TOP + sum(HEAD + h + X_LABEL for h in heights) + style.note_height(notes)
        figure = style.new_figure(style.DOUBLE_COLUMN, height)
        margins = _margins(groups)
        drawn: list[dict[str, Any]] = []
        top = TOP
        for (title, panel), tall in zip(groups, heights, strict=True):
            top += HEAD
            axes = _row(figure, height, top, tall, margins)
            lines = _lines(
                panel, by_panel.get(title, ratios.iloc[:0].assign(configuration=None)), cells[title], tables["cells"]
            )
            figure.text(
                0.06 / style.DOUBLE_COLUMN,
                1 - (top - HEAD + 0.04) / height,
                title,
                fontsize=7.5,
                fontweight="bold",
                va="top",
            )
            _draw_row(axes, panel, lines)
            drawn += [{"panel": title, **line} for line in lines]
            top += tall + X_LABEL
        style.footnote(figure, notes, style.DOUBLE_COLUMN)
        return style.save(figure, pd.DataFrame(drawn, columns=DRAWN), stem)


def _tall(panel: pd.DataFrame) -> float:
    """Inches of a row of panels."""
    lines = [broken(name).count("\n") + 1 for name in panel["configuration"]]
    return max(2, len(panel)) * max(LINE, LABEL_LINE * max(lines) + 0.06) + 0.08


def _margins(groups: Sequence[tuple[str, pd.DataFrame]]) -> tuple[float, float]:
    """Inches left for the longest name with its dagger, and right for the numbers and the counts of failed runs."""
    names = [f"{broken(name)}†" for _, panel in groups for name in panel["configuration"]]
    failed = any((panel["n_failed"] > 0).any() for _, panel in groups)
    return style.text_width(names, LABEL_SIZE) + LABEL_PAD, RIGHT_FAILED if failed else RIGHT


def _row(figure: Figure, height: float, top: float, tall: float, margins: tuple[float, float]) -> list[Axes]:
    width = style.DOUBLE_COLUMN
    unit = (width - sum(margins) - GAP * (len(SHARES) - 1)) / sum(SHARES)
    axes, left = [], margins[0]
    for share in SHARES:
        axes.append(figure.add_axes((left / width, 1 - (top + tall) / height, share * unit / width, tall / height)))
        left += share * unit + GAP
    return axes


def _lines(
    panel: pd.DataFrame, ratios: pd.DataFrame, cells: pd.DataFrame, every_cell: pd.DataFrame
) -> list[dict[str, Any]]:
    """What a row of panels shows, as data: one line a mark."""
    lines: list[dict[str, Any]] = []
    failed = cells[cells["status"] != "ok"]
    for group in in_order(panel):
        first = group.iloc[0]
        common = {"method": first["method"], "configuration": first["configuration"]}
        if first["n"]:
            lines.append(
                {
                    **common,
                    "quantity": "throughput",
                    "unit": "tokens/s",
                    "kind": "mean",
                    "value": first["throughput_tok_s"],
                    "low": first["throughput_low_tok_s"],
                    "high": first["throughput_high_tok_s"],
                    "n": first["n"],
                }
            )
        for _, cell in failed[failed["configuration"] == first["configuration"]].iterrows():
            lines.append(
                {
                    **common,
                    "quantity": "throughput",
                    "unit": "tokens/s",
                    "kind": "failed",
                    "repeat": cell["repeat"],
                    "reason": cell["reason"],
                }
            )
        for _, ratio in ratios[ratios["configuration"] == first["configuration"]].iterrows():
            lines += [{**common, **line} for line in _ratio_lines(ratio, every_cell)]
    return lines


def _ratio_lines(ratio: Mapping[str, Any], cells: pd.DataFrame) -> list[dict[str, Any]]:
    if ratio["comparison"] != "ok":
        return [{"quantity": "speedup", "kind": "none", "reason": ratio["reason"]}]
    lines: list[dict[str, Any]] = []
    pairs = run_ratios(cells, ratio)
    for quantity in QUANTITIES:
        unit = "tokens/round" if quantity == "accept_length_factor" else ""
        if ratio[quantity] != ratio[quantity]:
            lines.append({"quantity": quantity, "kind": "none", "reason": "the engine reports no rounds"})
            continue
        lines.append(
            {
                "quantity": quantity,
                "unit": unit,
                "kind": "mean",
                "value": ratio[quantity],
                "low": ratio[f"{quantity}_low"],
                "high": ratio[f"{quantity}_high"],
                "n": ratio["n"],
                "n_baseline": ratio["n_baseline"],
                "pairing": ratio["pairing"],
            }
        )
        lines += [
            {"quantity": quantity, "unit": unit, "kind": "run", "repeat": r, "value": v, "pairing": "paired"}
            for r, v in zip(pairs["repeat"], pairs[quantity], strict=True)
            if len(pairs) <= style.MAX_POINTS
        ]
    return lines


def _draw_row(axes: Sequence[Axes], panel: pd.DataFrame, lines: Sequence[Mapping[str, Any]]) -> None:
    order = [group["configuration"].iloc[0] for group in in_order(panel)]
    methods = dict(zip(panel["configuration"], panel["method"], strict=True))
    places = {name: -place for place, name in enumerate(order)}
    unpaired = {line["configuration"] for line in lines if line.get("pairing") == "unpaired"}
    for axis, quantity, head in zip(axes, QUANTITIES, HEADS, strict=True):
        axis.axvline(1, color=style.METHODS["AR"].colour, linestyle=style.METHODS["AR"].line, linewidth=0.8, zorder=1)
        for line in (line for line in lines if line["quantity"] == quantity):
            _mark(axis, line, places[line["configuration"]])
        axis.set_title(head, pad=4, fontsize=7)
        axis.set_ylim(-len(order) + 0.4, 0.6)
        axis.set_xlim(
            0,
            1.06
            * max(
                [
                    1.08 if quantity != "speedup" else 1.5,
                    *(_reach(line) for line in lines if line["quantity"] == quantity),
                ]
            ),
        )
        axis.locator_params(axis="x", nbins=5 if quantity == "speedup" else 4)
        axis.grid(axis="x")
        axis.grid(visible=False, axis="y")
        axis.set_yticks(list(places.values()), [""] * len(places))
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    for name, place in places.items():
        label = f"{broken(name)}{'†' if name in unpaired else ''}"
        _label(axes[0], label, place, style.METHODS[methods[name]].colour if methods[name] != "DFLASH" else "#9A6400")
        if methods[name] == "AR" and any(line["configuration"] == name and line["kind"] == "mean" for line in lines):
            axes[0].plot([1], [place], style.METHODS["AR"].marker, color=style.METHODS["AR"].colour, zorder=4)
    _signs(axes)
    _at_right(axes[-1], lines, places)
    _failed_at_right(axes[-1], panel, places)
    if "AR" not in methods.values():
        axes[0].text(
            0.97,
            0.5,
            "no AR\nbaseline",
            transform=axes[0].transAxes,
            ha="right",
            va="center",
            fontsize=7,
            color="#555555",
        )


def _reach(line: Mapping[str, Any]) -> float:
    ends = [line.get("value", 0.0), line.get("high", 0.0)]
    return max(end for end in ends if end == end)


def _label(axis: Axes, label: str, place: int, colour: str) -> None:
    axis.annotate(
        label,
        (0, place),
        xycoords=axis.get_yaxis_transform(),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=LABEL_SIZE,
        color=colour,
    )


def _mark(axis: Axes, line: Mapping[str, Any], place: int) -> None:
    look = style.METHODS[line["method"]]
    if line["kind"] == "none":
        axis.text(
            0.03, place, "no ratio", transform=axis.get_yaxis_transform(), fontsize=6, va="center", color="#555555"
        )
        return
    if line["kind"] == "run":
        axis.plot([line["value"]], [place - 0.27], look.marker, color=look.colour, markersize=1.8, alpha=0.8)
        return
    axis.plot(
        [1, line["value"]],
        [place, place],
        color=look.colour,
        linewidth=2.2,
        alpha=0.35,
        solid_capstyle="butt",
        zorder=2,
    )
    if line["low"] == line["low"]:
        axis.errorbar(
            [line["value"]],
            [place],
            xerr=[[line["value"] - line["low"]], [line["high"] - line["value"]]],
            color=look.colour,
            linewidth=0.9,
            capsize=2,
            zorder=3,
        )
    axis.plot([line["value"]], [place], look.marker, color=look.colour, zorder=4)


def _signs(axes: Sequence[Axes]) -> None:
    for axis, sign in zip(axes, SIGNS, strict=False):
        axis.annotate(
            sign,
            (1, 1),
            xycoords="axes fraction",
            xytext=(GAP * 36, 5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=10,
        )


def _at_right(axis: Axes, lines: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> None:
    """Speed-up and throughput as numbers beside the last panel."""
    across = axis.get_yaxis_transform()
    for text, points in (("ratio", RATIO_AT), ("tokens/s", SPEED_AT)):
        axis.annotate(
            text,
            (1, 1),
            xycoords="axes fraction",
            xytext=(points, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7,
        )
    for name, place in places.items():
        mine = [line for line in lines if line["configuration"] == name]
        numbers = {line["quantity"]: line["value"] for line in mine if line["kind"] == "mean"}
        ratio = 1.0 if name.startswith("AR") and "throughput" in numbers else numbers.get("speedup")
        for value, points in ((ratio, RATIO_AT), (numbers.get("throughput"), SPEED_AT)):
            text = "–" if value is None else f"{value:.2f}×" if points == RATIO_AT else style.number(value)
            axis.annotate(
                text,
                (1, place),
                xycoords=across,
                xytext=(points, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=7,
            )


def _failed_at_right(axis: Axes, panel: pd.DataFrame, places: Mapping[str, int]) -> None:
    """Beside the numbers, where no value is read: a cross and how many of how many runs failed."""
    for row in panel[panel["n_failed"] > 0].to_dict("records"):
        at = axis.get_yaxis_transform() + ScaledTranslation((SPEED_AT + 9) / 72, 0, axis.figure.dpi_scale_trans)
        place = places[row["configuration"]]
        axis.plot([1], [place], transform=at, clip_on=False, **style.failed_mark(not row["n"]))
        axis.annotate(
            f"{row['n_failed']}/{row['n_repeats'] + row['n_failed']}",
            (1, place),
            xycoords=axis.get_yaxis_transform(),
            xytext=(SPEED_AT + 14, 0),
            textcoords="offset points",
            va="center",
            fontsize=style.FOOT_SIZE,
            color=style.FAILED,
        )


def _notes(
    groups: Sequence[tuple[str, pd.DataFrame]], cells: Mapping[str, pd.DataFrame], ratios: pd.DataFrame
) -> list[str]:
    good = ratios[ratios["comparison"] == "ok"]
    paired, unpaired = ([int(n) for n in good.loc[good["pairing"] == kind, "n"]] for kind in ("paired", "unpaired"))
    interval = style.interval_note(paired, "bars", "95 % t-interval of the log-ratio", "pair")
    points = style.points_note(paired, "single pairs")
    lines = [
        f"{style.n_of(paired, 'pair')} of runs (fresh server starts) of one repeat and block. "
        f"Large marks: geometric mean; {interval}{points}. Residual: prefill, queueing, client. "
        "B: budget, K: top-k cap, C: concurrency. Axes start at 0; line at 1: AR."
    ]
    if unpaired:
        lines.append(
            f"† Unpaired (measured in other blocks): {style.n_of(unpaired)}, Welch's interval on log run means."
        )
    refused = ratios[ratios["comparison"].isin(["refused", "unequal_work"])]
    lines += [
        f"{', '.join(rows['server'])} ({workload} at {load}): {reason}"
        for (workload, load, reason), rows in refused.groupby(["workload", "load", "reason"], sort=False)
    ]
    for title, _ in groups:
        lines += failures(cells[title], title if len(groups) > 1 else "")
    return lines + marks(list(cells.items()))
