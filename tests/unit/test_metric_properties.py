"""Laws that the definitions of the metrics imply, on cells of any shape.

Moments are multiples of 1/1024 s, so that sums and differences of them are exact and laws can be asked for exactly.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st
from laws import law
from raw_rows import details, failed, frame, row, steady_stream

from ddtree_bench import metrics
from ddtree_bench.load import requests_table
from ddtree_bench.metrics import Slos
from ddtree_bench.metrics.answers import Answer, answer
from ddtree_bench.plan import Load

approx = pytest.approx

TICK = 1 / 1024
LATENCIES = ("ttft", "e2e", "tpot", "itl", "icl")
OPEN = Load(4, "open", 2.0, "poisson")

Raw = dict[str, Any]


@st.composite
def requests(draw: st.DrawFn, index: int = 0, intended: bool = False) -> Raw:
    """An ok request whose tokens are known in one of the ways there are, or not at all."""
    events = draw(
        st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=12)
    )
    start = draw(st.integers(0, 8000))
    ticks = start + np.cumsum([gap for gap, _, _ in events])
    counts = [max(1, events[0][1]), *(n for _, n, _ in events[1:])]
    eos = draw(st.integers(0, 1))
    finish = draw(st.none() | st.integers(0, 500))
    known = draw(st.sampled_from(["continuous", "usage", "tokenizer", "both", "unknown"]))
    so_far = np.cumsum(counts).tolist() if known == "continuous" else [None] * len(events)
    trailing = [0] * (2 if finish is None else 3)
    return row(
        [(t * TICK, "x" * e[2], n) for t, e, n in zip(ticks.tolist(), events, so_far, strict=True)],
        index=index,
        t_send=start * TICK,
        tokens=None if known in ("tokenizer", "unknown") else sum(counts) + eos,
        finish=None if finish is None else (int(ticks[-1]) + finish) * TICK,
        t_end=(int(ticks[-1]) + (finish or 0) + 1) * TICK,
        event_tokenized=[*counts, *trailing] if known in ("tokenizer", "both") else None,
        intended_start=(start - draw(st.integers(0, 900))) * TICK if intended else None,
        spec=draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=5).map(details)),
        finish_reason=draw(st.sampled_from(["length", "stop"])),
    )


@st.composite
def cells(draw: st.DrawFn, intended: bool = False) -> list[Raw]:
    return [draw(requests(index=i, intended=intended)) for i in range(draw(st.integers(1, 6)))]


def found(rows: Sequence[Raw], load: Load | None = None, slos: Slos | None = None) -> dict[str, Any]:
    return metrics.cell_metrics(frame(*rows), load or Load(1), None, slos)


def parsed(raw: Raw) -> Answer:
    given_ = answer(frame(raw).iloc[0])
    assert given_ is not None
    return given_


def moved(raw: Raw, move: Callable[[float], float]) -> Raw:
    """A request with every moment moved."""
    moments = {name: None if raw[name] is None else move(raw[name]) for name in ("intended_start", "t_send", "t_end")}
    return raw | moments | {"t_sent": move(raw["t_sent"]), "event_times": [move(t) for t in raw["event_times"]]}


# Tokens and gaps of one answer


@law(requests())
def test_the_tokens_of_the_events_sum_to_n(raw: Raw) -> None:
    tokens = parsed(raw).tokens
    if tokens.total is None:
        assert (tokens.source, tokens.n1, tokens.counts, tokens.n_source) == (None, None, None, None)
        return
    assert tokens.counts is not None
    assert tokens.n1 is not None
    assert tokens.counts.sum() == tokens.total
    assert tokens.counts.min() >= 0
    assert 1 <= tokens.n1 <= tokens.counts[0]
    assert tokens.source in ("usage", "tokenizer")


@law(requests())
def test_itl_sums_to_the_time_from_the_first_to_the_last_event(raw: Raw) -> None:
    given_ = parsed(raw)
    latencies, tokens = given_.itl_s()
    counts = given_.tokens.counts
    if counts is None or not counts[1:].sum():
        assert not latencies.size
        return
    assert latencies @ tokens == approx(given_.times[-1] - given_.times[0])
    assert tokens.sum() == counts[1:].sum()
    assert given_.icl_s.sum() == given_.times[-1] - given_.times[0]


@law(requests())
def test_times_of_a_request_add_up(raw: Raw) -> None:
    metric = metrics.request_metrics(frame(raw)).iloc[0]
    assert 0 <= metric["ttft_s"] <= metric["e2e_s"]
    at_once = metric["token_events"] == 1 and metric["ttft_s"] == metric["e2e_s"]
    one_event = at_once or (metric["n1"] is not pd.NA and metric["output_tokens"] <= metric["n1"])
    assert pd.isna(metric["tpot_s"]) == (pd.isna(metric["output_tokens"]) or one_event)
    if not pd.isna(metric["tpot_s"]):
        decoded = metric["tpot_s"] * (metric["output_tokens"] - metric["n1"])
        assert decoded == approx(metric["e2e_s"] - metric["ttft_s"])


@law(raw=requests(), place=st.integers(0, 11), share=st.floats(0, 1))
def test_an_event_without_a_token_changes_no_itl(raw: Raw, place: int, share: float) -> None:
    """The gap before it joins the next."""
    bearing = raw["event_kinds"].count("token")
    if raw["event_tokens"][0] is None or place >= bearing - 1:
        return
    before, after = raw["event_times"][place : place + 2]
    values = {
        "event_times": before + share * (after - before),
        "event_lags": 0.0,
        "event_kinds": "token",
        "event_texts": "y",
        "event_tokens": raw["event_tokens"][place],
        "event_finish": False,
    }
    more = raw | {name: [*raw[name][: place + 1], value, *raw[name][place + 1 :]] for name, value in values.items()}
    assert [one.tolist() for one in parsed(more).itl_s()] == [one.tolist() for one in parsed(raw).itl_s()]
    assert found([more])["throughput_full_tok_s"] == found([raw])["throughput_full_tok_s"]


@law(raw=requests(), parts=st.integers(2, 4))
def test_tokens_that_come_in_several_events_at_once_are_as_fast(raw: Raw, parts: int) -> None:
    """Throughput, peak and mean ITL count tokens, not events."""
    if raw["event_tokens"][0] is None:
        return
    split: dict[str, list[Any]] = {name: [] for name in raw if name.startswith("event_") and raw[name] is not None}
    so_far = 0
    for i, kind in enumerate(raw["event_kinds"]):
        several = parts if kind == "token" and i and raw["event_tokens"][i] - so_far >= parts else 1
        for part in range(several):
            for name, values in split.items():
                values.append(raw[name][i])
            if several > 1 and part < several - 1:
                split["event_tokens"][-1] = so_far + part + 1
                split["event_finish"][-1] = False
        so_far = raw["event_tokens"][i] if kind == "token" else so_far
    one, more = found([raw]), found([raw | split])
    for name in ("throughput_full_tok_s", "throughput_steady_tok_s", "peak_throughput_tok_s", "user_speed_tok_s"):
        assert more[name] == one[name]
    assert more["itl_mean_s"] == (None if one["itl_mean_s"] is None else approx(one["itl_mean_s"]))


# Cells


@law(cells())
def test_the_peak_is_never_below_the_mean_over_whole_seconds(rows: list[Raw]) -> None:
    of_cell = found(rows)
    if of_cell["peak_throughput_tok_s"] is None:
        assert of_cell["output_tokens"] is None or of_cell["wall_s"] < 3
        return
    assert of_cell["wall_s"] >= 3
    assert of_cell["peak_throughput_tok_s"] >= of_cell["output_tokens"] / (math.floor(of_cell["wall_s"]) + 1)
    assert of_cell["peak_throughput_tok_s"] <= of_cell["output_tokens"]


@law(data=st.data(), intended=st.booleans())
def test_the_order_of_the_requests_changes_no_metric(data: st.DataObject, intended: bool) -> None:
    rows, load = data.draw(cells(intended=intended)), OPEN if intended else Load(2)
    mixed = data.draw(st.permutations(rows))
    slos = Slos(ttft_s=1.0, tpot_s=0.3)
    assert found(mixed, load, slos) == found(rows, load, slos)
    pd.testing.assert_frame_equal(metrics.acceptance_by_depth(frame(*mixed)), metrics.acceptance_by_depth(frame(*rows)))
    by_request = metrics.request_metrics(frame(*mixed)).sort_values("index", ignore_index=True)
    pd.testing.assert_frame_equal(by_request, metrics.request_metrics(frame(*rows)))


@law(data=st.data(), intended=st.booleans(), shift=st.integers(-(2**20), 2**20))
def test_a_clock_with_another_zero_changes_no_metric(data: st.DataObject, intended: bool, shift: int) -> None:
    rows, load = data.draw(cells(intended=intended)), OPEN if intended else Load(2)
    later = [moved(raw, lambda t: t + shift) for raw in rows]
    slos = Slos(ttft_s=1.0, e2e_s=2.0)
    assert found(later, load, slos) == found(rows, load, slos)


@law(data=st.data(), intended=st.booleans())
def test_a_clock_that_runs_twice_as_fast_doubles_latencies_and_halves_rates(
    data: st.DataObject, intended: bool
) -> None:
    rows, load = data.draw(cells(intended=intended)), OPEN if intended else Load(2)
    one, two = found(rows, load), found([moved(raw, lambda t: 2 * t) for raw in rows], load)
    peak = "peak_throughput_tok_s"  # counts in a fixed second
    for name, value in one.items():
        if name == peak:
            continue
        factor = (
            2.0 if name.endswith("_s") and "_per_s" not in name and "tok_s" not in name and "req_s" not in name else 1.0
        )
        factor = 2.0 if name in ("decode_s_per_token",) else factor
        factor = 0.5 if name.endswith(("tok_s", "req_s", "_per_s")) else factor
        assert two[name] == (value if value is None or isinstance(value, str) else value * factor), name


@law(rows=cells(), status=st.sampled_from([s for s in requests_table.STATUSES if s != "ok"]), more=requests())
def test_a_failed_request_changes_no_latency_and_no_full_throughput(rows: list[Raw], status: str, more: Raw) -> None:
    bad = more | {"index": len(rows), "status": status}
    alone, beside = found(rows), found([*rows, bad])
    same = ("throughput_full_tok_s", "user_speed_tok_s", "output_tokens", "wall_s", "accept_length", "rounds")
    spread = [f"{name}_{one}_s" for name in LATENCIES for one in ("mean", "p50", "p90", "p99")]
    assert [beside[name] for name in (*same, *spread)] == [alone[name] for name in (*same, *spread)]
    assert beside[f"requests_{status}"] == 1


@law(rows=cells(), users=st.integers(1, 4))
def test_requests_in_flight(rows: list[Raw], users: int) -> None:
    of_cell = found(rows, Load(users))
    durations = sum(raw["t_end"] - raw["t_send"] for raw in rows)
    span = max(raw["t_end"] for raw in rows) - min(raw["t_send"] for raw in rows)
    assert of_cell["mean_in_flight"] == approx(durations / span)
    assert of_cell["mean_in_flight"] <= of_cell["most_in_flight"] <= len(rows)
    assert (of_cell["steady_window_s"] is None) == (of_cell["most_in_flight"] < users)
    if of_cell["steady_token_share"] is not None:
        assert 0 <= of_cell["steady_token_share"] <= 1
        assert (of_cell["throughput_window"] == "steady") == (of_cell["steady_token_share"] >= 0.5)


@law(cells())
def test_one_request_without_tokens_makes_the_cells_unknown(rows: list[Raw]) -> None:
    of_cell = found(rows)
    unknown = any(parsed(raw).tokens.total is None for raw in rows)
    for name in ("output_tokens", "throughput_full_tok_s", "throughput_window", "token_source", "accept_length"):
        if unknown:
            assert of_cell[name] is None
    assert (of_cell["output_tokens"] is None) is unknown
    assert of_cell["ttft_mean_s"] is not None


@law(
    rows=cells(intended=True),
    ttft=st.none() | st.floats(0.001, 4),
    tpot=st.none() | st.floats(0.001, 4),
    e2e=st.none() | st.floats(0.001, 12),
    loads=st.sampled_from([OPEN, Load(2)]),
)
def test_goodput_is_no_more_than_the_rate_of_ok_requests_and_grows_with_the_objectives(
    rows: list[Raw], ttft: float | None, tpot: float | None, e2e: float | None, loads: Load
) -> None:
    strict = Slos(ttft, tpot, e2e)
    looser = Slos(None if ttft is None else 2 * ttft, tpot, e2e)
    of_cell = found(rows, loads, strict)
    if not strict.any_given:
        assert of_cell["goodput_req_s"] is None
        return
    assert 0 <= of_cell["slo_met"] <= found(rows, loads, looser)["slo_met"] <= len(rows)
    if of_cell["goodput_req_s"] is not None:
        assert of_cell["goodput_req_s"] <= of_cell["requests_per_s"]
        assert of_cell["goodput_req_s"] == approx(of_cell["slo_met"] / of_cell["wall_s"])


@pytest.mark.parametrize("n", [1, 35, 36, 367, 368])
def test_percentiles_of_requests_are_given_by_their_number(n: int) -> None:
    of_cell = found([steady_stream(2, 0.5, t_send=float(i), index=i) for i in range(n)])
    for name in LATENCIES:
        assert of_cell[f"{name}_p50_s"] is not None
        assert (of_cell[f"{name}_p90_s"] is not None) == (n >= 36)
        assert (of_cell[f"{name}_p99_s"] is not None) == (n >= 368)


@law(cells(intended=True), most=20)
def test_percentiles_are_in_order_and_are_values_that_were_seen(rows: list[Raw]) -> None:
    many = [raw | {"index": i} for i, raw in enumerate(rows * 368)]
    of_cell = found(many[:400] if len(rows) > 1 else many, OPEN)
    for name in (*LATENCIES, "ttft_from_intended", "e2e_from_intended"):
        p50, p90, p99 = (of_cell[f"{name}_p{p}_s"] for p in (50, 90, 99))
        if p99 is not None:
            assert p50 <= p90 <= p99
    ttfts = {parsed(raw).ttft_s for raw in rows}
    assert {of_cell[f"ttft_p{p}_s"] for p in (50, 90, 99)} <= ttfts


@law(cells(intended=True))
def test_a_wait_in_the_client_is_in_the_latencies_from_the_scheduled_start(rows: list[Raw]) -> None:
    metric = metrics.request_metrics(frame(*rows))
    waited = [raw["t_send"] - raw["intended_start"] for raw in rows]
    for name in ("ttft", "e2e"):
        assert (metric[f"{name}_from_intended_s"] - metric[f"{name}_s"]).tolist() == waited


@law(rows=cells(), silent=st.booleans())
def test_metrics_from_the_file_are_those_of_the_frame(rows: list[Raw], silent: bool) -> None:
    requests_ = frame(*rows, *([failed("timeout", index=len(rows))] if silent else []))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.parquet"
        requests_table.write(requests_, path, metrics.request_metrics(requests_))
        back = requests_table.read(path)
    pd.testing.assert_frame_equal(back, requests_)
    assert metrics.cell_metrics(back, Load(2), None) == metrics.cell_metrics(requests_, Load(2), None)
