"""Our client and SGLang's bench_serving side by side, so that neither is believed alone.

Each quantity is given three times: as bench_serving says it; by bench_serving's definition from our own raw stamps,
which shows whether the two clients see the same; and by our definition, which shows what the name means here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from ddtree_bench.measuring.bench_serving import Result
from ddtree_bench.measuring.measured_table import number

WIDTH = 160


@dataclass(frozen=True)
class Line:
    """One quantity: theirs, ours by their definition, ours by our own (NaN where we have none), and what differs."""

    name: str
    unit: str
    theirs: float
    restated: float
    ours: float
    why: str

    @property
    def difference(self) -> float:
        """(restated - theirs) / theirs."""
        return (self.restated - self.theirs) / self.theirs if self.theirs else math.nan


def restated(requests: pd.DataFrame) -> Result:
    """Return our raw record by bench_serving's definitions; `requests` has the columns of requests_table.SCHEMA.

    Its clock starts before it connects and stops at the last line of an answer, [DONE] included. TPOT divides by N - 1
    whatever the first event held, ITL is the plain gap between events with text, and throughput divides by the time
    from the first send to the last line. Its peak counts events, not tokens, in seconds since the first send.
    """
    ok = [row for row in requests.to_dict("records") if row["status"] == "ok"]
    if not ok:
        return Result(0, 0, *[math.nan] * 7)
    events = [_text_times(row) for row in ok]
    began = [row["t_send"] - (_known(row["connect_s"]) or 0.0) for row in ok]
    ttft = [times[0] - start for times, start in zip(events, began, strict=True)]
    e2e = [row["t_end"] - start for row, start in zip(ok, began, strict=True)]
    tokens = [int(row["completion_tokens"]) for row in ok]
    tpot = [(whole - first) / (n - 1) for whole, first, n in zip(e2e, ttft, tokens, strict=True) if n > 1]
    gaps = [b - a for times in events for a, b in pairwise(times)]
    duration = max(row["t_end"] for row in ok) - min(began)
    return Result(
        completed=len(ok),
        output_tokens=sum(tokens),
        duration_s=duration,
        throughput_tok_s=sum(tokens) / duration,
        peak_tok_s=_most_events([time - min(began) for times in events for time in times]),
        ttft_s=_mean(ttft),
        tpot_s=_mean(tpot),
        itl_s=_mean(gaps),
        e2e_s=_mean(e2e),
    )


def compare(theirs: Result, ours: Result, document: Mapping[str, Any]) -> list[Line]:
    """Return the quantities of both; `document` is the content of our metrics.json."""

    def own(name: str, part: str | None = None) -> float:
        value = document.get(name)
        value = value.get(part) if part is not None and isinstance(value, Mapping) else value
        return math.nan if value is None else float(value)

    return [
        Line("requests ok", "", theirs.completed, ours.completed, document["requests"]["ok"], "the same"),
        Line("output tokens", "tokens", theirs.output_tokens, ours.output_tokens, own("output_tokens"), _TOKENS),
        Line("throughput", "tokens/s", theirs.throughput_tok_s, ours.throughput_tok_s, own("throughput_tok_s"), _RATE),
        Line("peak over 1 s", "1/s", theirs.peak_tok_s, ours.peak_tok_s, own("peak_tok_s"), _PEAK),
        Line("TTFT, mean", "s", theirs.ttft_s, ours.ttft_s, own("ttft_s", "mean"), _TTFT),
        Line("TPOT, mean", "s/token", theirs.tpot_s, ours.tpot_s, own("tpot_s", "mean"), _TPOT),
        Line("ITL, mean", "s", theirs.itl_s, ours.itl_s, own("itl_s", "mean"), _ITL),
        Line("ICL, mean", "s", theirs.itl_s, ours.itl_s, own("icl_s", "mean"), "ICL is the name here for their ITL"),
        Line("E2E, mean", "s", theirs.e2e_s, ours.e2e_s, own("e2e_s", "mean"), _E2E),
    ]


_TOKENS = "theirs: usage of the last event with text, and max_tokens where there is none; ours: the last usage"
_RATE = "theirs: until the last line of the last answer; ours: from the first send to the last token"
_PEAK = "theirs counts events in whole seconds; ours tokens in a sliding second, NA below 3 s"
_TTFT = "theirs holds the connecting, once a request; ours starts when the request is handed to the kernel"
_TPOT = "theirs divides by N - 1 up to the last line; ours by N - n1 up to the last token"
_ITL = "theirs is the gap between events, however many tokens one brings; ours divides it over the tokens"
_E2E = "theirs ends with [DONE]; ours with the last token or the finish_reason"


def rendered(lines: Sequence[Line]) -> str:
    """Return the comparison as a table for the terminal."""
    output = StringIO()
    console = Console(file=output, width=WIDTH, no_color=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "bench_serving", "ours, their way", "differs by", "ours", "unit"):
        table.add_column(name, justify="left" if name in ("", "unit") else "right", no_wrap=True)
    table.add_column("what differs by definition")
    for line in lines:
        shown = (number(None if math.isnan(value) else value) for value in (line.theirs, line.restated, line.ours))
        theirs, ours_their_way, ours = shown
        change = "–" if math.isnan(line.difference) else f"{line.difference:+.1%}"
        table.add_row(line.name, theirs, ours_their_way, change, ours, line.unit, line.why)
    console.print(table)
    return "\n".join(text.rstrip() for text in output.getvalue().splitlines() if text.strip())


def _text_times(row: Mapping[str, Any]) -> list[float]:
    """When the events that carry text were read, as it counts them."""
    return [time for time, text in zip(row["event_times"], row["event_texts"], strict=True) if text]


def _most_events(times: Sequence[float]) -> float:
    seconds = [int(time) for time in times]
    return float(max(seconds.count(second) for second in set(seconds)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _known(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
