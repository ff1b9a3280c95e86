"""Metrics of requests and cells against values computed by hand; numbers are those of the fault list."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st
from laws import law
from raw_rows import details, failed, frame, row, steady_stream

from ddtree_bench import metrics
from ddtree_bench.load import requests_table
from ddtree_bench.metrics import definitions
from ddtree_bench.metrics.answers import answer
from ddtree_bench.metrics.percentiles import least_n, nearest_rank, summary
from ddtree_bench.metrics.throughput import full_house, peak_throughput
from ddtree_bench.metrics.tokens import share_by_text
from ddtree_bench.plan import Load

approx = pytest.approx


def one(raw: dict[str, Any]) -> pd.Series[Any]:
    return metrics.request_metrics(frame(raw)).iloc[0]


def cell(*rows: dict[str, Any], concurrency: int = 1, method: str = "AR") -> dict[str, Any]:
    return metrics.cell_metrics(frame(*rows), Load(concurrency), method)


def test_fault_01_a_chunk_of_three_tokens_after_9_ms_is_three_gaps_of_3_ms() -> None:
    raw = row([(0.1, "a", 1), (0.109, "bcd", 4)], tokens=4)
    given_ = answer(raw)
    assert given_ is not None
    latencies, tokens = given_.itl_s()
    assert (latencies.tolist(), tokens.tolist()) == ([approx(0.003)], [3])
    assert given_.icl_s.tolist() == [approx(0.009)]
    assert one(raw)["itl_mean_s"] == approx(0.003)
    assert one(raw)["icl_mean_s"] == approx(0.009)


def test_fault_01_itl_and_throughput_of_a_single_stream_agree() -> None:
    """8.7 ms a chunk of 2.54 tokens is 3.4 ms a token, which is what 292 tok/s are."""
    counts = [3] * 54 + [2] * 46
    ends = np.cumsum([1, *counts])
    raw = row([(0.0087 * i, "x", int(n)) for i, n in enumerate(ends)], tokens=int(ends[-1]))
    assert one(raw)["itl_mean_s"] == approx(0.0087 / 2.54)
    assert 1 / one(raw)["itl_mean_s"] == approx(292, abs=1)


def test_fault_02_tokens_come_from_usage_and_events_then_share_them_by_text() -> None:
    raw = row([(0.1, "aaaa", None), (0.2, "bb", None), (0.3, "cc", None)], tokens=8)
    metric = one(raw)
    assert (metric["output_tokens"], metric["token_source"]) == (8, "usage")
    assert (metric["n1"], metric["n1_source"]) == (4, "text_share")
    assert metric["tpot_s"] == approx(0.2 / 4)


def test_fault_02_without_usage_nothing_is_made_up() -> None:
    raw = row([(0.1, "one ", None), (0.2, "two", None)], tokens=None)
    metric, of_cell = one(raw), cell(raw)
    assert metric[["output_tokens", "token_source", "n1", "tpot_s", "itl_mean_s", "user_speed_tok_s"]].isna().all()
    assert metric["ttft_s"] == approx(0.1)
    assert metric["icl_mean_s"] == approx(0.1)
    assert (of_cell["output_tokens"], of_cell["throughput_full_tok_s"], of_cell["user_speed_tok_s"]) == (None,) * 3
    assert of_cell["output_tokens_all_requests"] is None
    assert of_cell["e2e_p50_s"] == approx(0.2)


def test_fault_02_one_request_without_usage_makes_the_cells_tokens_unknown() -> None:
    of_cell = cell(steady_stream(10, 0.02), row([(0.5, "x", None)], index=1, tokens=None))
    names = ("output_tokens", "token_source", "n_source", "throughput_full_tok_s")
    assert [of_cell[name] for name in names] == [None] * 4
    assert of_cell["requests_ok"] == 2


def test_fault_02_a_cell_says_where_its_tokens_are_from() -> None:
    shared = row([(0.1, "one ", None), (0.2, "two", None)], tokens=3, index=1)
    assert [cell(steady_stream(10, 0.02), shared)[name] for name in ("token_source", "n_source")] == ["usage", "mixed"]
    assert cell(shared)["n_source"] == "text_share"


def test_fault_03_reasoning_is_output_from_its_first_event_on() -> None:
    """The client marks reasoning as token-bearing; TTFT is then not late by the thinking."""
    raw = row([(0.1, "hmm", 1), (5.0, "answer", 2)], tokens=2)
    assert one(raw)[["ttft_s", "output_tokens"]].tolist() == [approx(0.1), 2]


@pytest.mark.parametrize("status", [s for s in requests_table.STATUSES if s != "ok"])
def test_fault_04_failed_requests_are_counted_beside_and_never_in(status: str) -> None:
    good = steady_stream(100, 0.02, first=0.02)
    bad = row([(1.0, "x", 1), (1.5, "x", 2), (30.0, "x", 3)], index=1, tokens=3, status=status, t_sent=1e-4)
    both, alone = cell(good, bad), cell(good)
    assert (both["requests"], both["requests_ok"], both[f"requests_{status}"]) == (2, 1, 1)
    assert both["throughput_full_tok_s"] == alone["throughput_full_tok_s"] == approx(100 / 2.0)
    # The steady window is defined by what is in flight, and the failed request is: it lasts until 30.001 s.
    assert (both["steady_window_s"], both["steady_token_share"]) == (approx(30.001), 1.0)
    assert both["throughput_steady_tok_s"] == approx(100 / 30.001)
    assert alone["throughput_steady_tok_s"] == approx(100 / 2.001)
    assert both["ttft_mean_s"] == alone["ttft_mean_s"]
    assert (both["output_tokens"], both["output_tokens_all_requests"]) == (100, 103)
    assert both["texts_sha256"] is None
    assert alone["texts_sha256"] is not None
    assert metrics.request_metrics(frame(bad))[["ttft_s", "e2e_s", "tpot_s"]].isna().all(axis=None)


def test_fault_04_a_request_that_timed_out_takes_nothing_from_the_full_throughput() -> None:
    """3 s of answers and one that was silent for 300 s: 50 tok/s of one slot, not 0.5. Steady holds its place."""
    rows = [steady_stream(50, 0.02, first=0.02, t_send=1.001 * i, index=i) for i in range(3)]
    silent = failed("timeout", index=3, t_send=3.003, t_end=303.0)
    of_cell = cell(*rows, silent)
    assert of_cell["throughput_full_tok_s"] == approx(150 / 3.002, rel=1e-3)
    assert of_cell["throughput_steady_tok_s"] == approx(150 / 303.0)


def test_fault_05_the_peak_counts_tokens() -> None:
    """32 events a second of 3 tokens each: the peak is 96 tok/s and not 32, and not below the mean."""
    raw = row([((i + 1) / 32, "x", 3 * (i + 1)) for i in range(160)], tokens=480)
    of_cell = cell(raw)
    assert of_cell["peak_throughput_tok_s"] == approx(96)
    assert of_cell["throughput_full_tok_s"] == approx(96)


def test_fault_05_no_peak_of_a_cell_below_three_seconds() -> None:
    assert cell(steady_stream(100, 0.0297, first=0.05))["peak_throughput_tok_s"] is None
    assert cell(steady_stream(100, 0.0297, first=0.07))["peak_throughput_tok_s"] is not None


@pytest.mark.parametrize("counted", [True, False])
def test_fault_06_a_first_event_that_bundles_40_tokens(counted: bool) -> None:
    texts = ["word " * 40] + ["word "] * 60
    events = [(1.0 + 0.02 * i, text, 40 + i if counted else None) for i, text in enumerate(texts)]
    metric = one(row(events, tokens=100))
    assert metric[["n1", "n1_source"]].tolist() == [40, "usage" if counted else "text_share"]
    assert metric["tpot_s"] == approx(0.020)
    assert metric["itl_mean_s"] == approx(0.020)


def test_an_eos_token_counts_and_carries_no_text() -> None:
    raw = row([(0.1, "a", 1), (0.2, "b", 2)], tokens=3, finish=0.3)
    metric = one(raw)
    assert metric[["ttft_s", "e2e_s", "tpot_s", "n1"]].tolist() == [approx(0.1), approx(0.3), approx(0.1), 1]
    given_ = answer(raw)
    assert given_ is not None
    assert given_.tokens.counts is not None
    assert given_.tokens.counts.tolist() == [1, 2]
    assert metric["itl_mean_s"] * 2 == approx(0.1)


def test_trailing_usage_and_done_do_not_count() -> None:
    raw = row([(0.1, "a", 1), (0.2, "b", 2)], tokens=2)
    raw["event_times"][-2:] = [9.0, 9.0]
    raw["t_end"] = 9.0
    assert one(raw)["e2e_s"] == approx(0.2)
    assert cell(raw)["wall_s"] == approx(0.2)


def test_all_tokens_in_one_event_have_no_time_per_token() -> None:
    raw = row([(0.4, "all of it", 9)], tokens=9)
    metric, of_cell = one(raw), cell(raw)
    assert metric[["ttft_s", "e2e_s", "n1"]].tolist() == [approx(0.4), approx(0.4), 9]
    assert metric[["tpot_s", "itl_mean_s", "icl_mean_s"]].isna().all()
    assert (of_cell["tpot_mean_s"], of_cell["decode_s_per_token"], of_cell["round_time_s"]) == (None,) * 3
    assert of_cell["throughput_full_tok_s"] == approx(9 / 0.4)


def test_events_that_came_in_one_piece_have_no_decode_time() -> None:
    raw = row([(0.4, "a", 1), (0.4, "b", 2), (0.4, "c", 3)], tokens=3)
    assert (cell(raw)["decode_s_per_token"], cell(raw)["round_time_s"]) == (None, None)
    spread = row([(0.4, "a", 1), (0.4, "b", 2), (0.6, "c", 3)], tokens=3, index=1)
    assert cell(raw, spread)["decode_s_per_token"] == approx(0.2 / 2), "its tokens do not count either"


def test_an_answer_in_no_time_at_all_has_no_speed() -> None:
    at_once = row([(0.0, "all of it", 9)], tokens=9)
    assert pd.isna(one(at_once)["user_speed_tok_s"])
    assert cell(at_once)["user_speed_tok_s"] is None
    assert cell(at_once, row([(2.0, "a", 4)], tokens=4, index=1))["user_speed_tok_s"] == approx(2)


def test_one_event_and_an_eos_apart_has_a_time_per_token() -> None:
    metric = one(row([(0.4, "a", 1)], tokens=2, finish=0.5))
    assert metric[["n1", "tpot_s"]].tolist() == [1, approx(0.1)]
    assert pd.isna(metric["itl_mean_s"])


def test_an_answer_with_its_eos_in_one_event_has_no_time_per_token() -> None:
    """By a tokenizer the EOS is in N and in no text; no time passed, so nothing is said of the time per token."""
    raw = row([(0.4, "abc", None)], tokens=4, event_tokenized=[3, 0, 0])
    metric = one(raw)
    assert metric[["n1", "output_tokens"]].tolist() == [3, 4]
    assert pd.isna(metric["tpot_s"])
    assert cell(raw)["decode_s_per_token"] is None


def test_gaps_before_events_without_a_token_join_the_next() -> None:
    """Counts 1, 0, 2, 0: the last gap has no next and joins the one before."""
    given_ = answer(row([(0.0, "a", 1), (0.1, "b", 1), (0.3, "c", 3), (0.4, "d", 3)], tokens=3))
    assert given_ is not None
    latencies, tokens = given_.itl_s()
    assert (latencies.tolist(), tokens.tolist()) == ([approx(0.2)], [2])


@pytest.mark.parametrize("so_far", [[0, 2, 3], [2, 1, 3], [1, 2, 9], [1, None, 3]])
def test_continuous_usage_that_cannot_be_right_is_not_used(so_far: list[int | None]) -> None:
    metric = one(row([(0.1 * i, "ab", n) for i, n in enumerate(so_far, 1)], tokens=3))
    assert metric[["n1", "n1_source"]].tolist() == [1, "text_share"]


def test_latencies_from_the_scheduled_start_show_the_wait_in_the_client() -> None:
    metric = one(steady_stream(3, 0.1, first=0.2, t_send=5.0, intended_start=4.0))
    assert metric[["ttft_s", "ttft_from_intended_s"]].tolist() == [approx(0.2), approx(1.2)]
    assert metric["e2e_from_intended_s"] == approx(1.4)


# Cells


def test_a_cell_by_hand() -> None:
    """Two slots: 0 to 2.001 and 1 to 4.001 s, then 2.1 to 5.101 s."""
    rows = [
        row([(1.0, "a", 10), (2.0, "b", 20)], tokens=20),
        row([(3.0, "a", 10), (4.0, "b", 20)], tokens=20, index=1, t_send=1.0),
        row([(3.5, "a", 10), (5.1, "b", 20)], tokens=20, index=2, t_send=2.1),
    ]
    of_cell = cell(*rows, concurrency=2)
    assert of_cell["wall_s"] == approx(5.1)
    assert of_cell["throughput_full_tok_s"] == approx(60 / 5.1)
    assert of_cell["steady_window_s"] == approx(4.001 - 1.0)
    assert of_cell["throughput_steady_tok_s"] == approx(50 / 3.001)
    assert of_cell["steady_token_share"] == approx(50 / 60)
    assert of_cell["throughput_window"] == "steady"
    assert of_cell["peak_throughput_tok_s"] == approx(20)
    assert of_cell["user_speed_tok_s"] == approx((20 / 2 + 20 / 3 + 20 / 3) / 3)
    assert of_cell["mean_in_flight"] == approx((2.001 + 3.001 + 3.001) / 5.101)
    assert of_cell["most_in_flight"] == 2
    assert of_cell["ttft_mean_s"] == approx((1 + 2 + 1.4) / 3)
    assert of_cell["ttft_p50_s"] == approx(1.4)
    assert (of_cell["ttft_p90_s"], of_cell["ttft_p99_s"]) == (None, None)
    assert of_cell["decode_s_per_token"] == approx((1 + 1 + 1.6) / 30)
    assert (of_cell["output_length_min"], of_cell["output_length_mean"]) == (20, 20)
    assert (of_cell["finished_by_length"], of_cell["finished_by_stop"]) == (3, 0)


def test_fault_11_load_that_never_got_there_has_no_steady_window() -> None:
    of_cell = cell(steady_stream(50, 0.1), steady_stream(50, 0.1, index=1), concurrency=64)
    assert (of_cell["most_in_flight"], of_cell["steady_window_s"]) == (2, None)
    assert of_cell["throughput_steady_tok_s"] is None
    assert of_cell["throughput_window"] == "full"


def test_a_steady_window_with_less_than_half_of_the_tokens_is_not_used() -> None:
    long = steady_stream(100, 0.1)
    brief = row([(0.1, "a", 1), (1.0, "b", 2)], tokens=2, index=1)
    of_cell = cell(long, brief, concurrency=2)
    assert of_cell["steady_token_share"] == approx(12 / 102)
    assert of_cell["throughput_window"] == "full"
    assert of_cell["throughput_steady_tok_s"] is not None


def test_one_slot_is_steady_from_the_first_request_to_the_last() -> None:
    rows = [steady_stream(10, 0.1, t_send=2.0 * i, index=i) for i in range(3)]
    assert full_house(rows, 1) == (0.0, approx(5.001))
    assert cell(*rows)["throughput_window"] == "steady"


def test_fault_14_cached_prompt_tokens_are_recorded_and_unknown_when_not_told() -> None:
    rows = [steady_stream(4, 0.1, cached_prompt_tokens=3), steady_stream(4, 0.1, index=1)]
    assert (cell(*rows)["cached_prompt_tokens"], cell(*rows)["prompt_tokens"]) == (3, 10)
    assert cell(*rows, steady_stream(4, 0.1, cached_prompt_tokens=None))["cached_prompt_tokens"] is None


def test_fault_16_lengths_and_finish_reasons_are_shown() -> None:
    of_cell = cell(steady_stream(4, 0.1, finish_reason="stop"), steady_stream(20, 0.1, index=1))
    assert (of_cell["output_length_min"], of_cell["output_length_max"], of_cell["output_length_mean"]) == (4, 20, 12)
    assert (of_cell["finished_by_stop"], of_cell["finished_by_length"], of_cell["finished_by_other"]) == (1, 1, 0)


def test_fault_16_every_ok_request_is_in_one_of_the_finish_reasons() -> None:
    reasons = ["stop", "length", "tool_calls", "content_filter", None]
    rows = [steady_stream(4, 0.1, finish_reason=reason, index=i) for i, reason in enumerate(reasons)]
    of_cell = cell(*rows, failed("timeout", index=9, finish_reason="length"))
    assert [of_cell[f"finished_by_{kind}"] for kind in ("length", "stop", "other")] == [1, 1, 3]
    assert of_cell["requests_ok"] == 5


def test_fault_21_all_requests_failed_is_a_cell_with_all_keys() -> None:
    of_cell = cell(failed("connect_error", http_status=None, prompt_tokens=None), failed("timeout", index=1))
    assert list(of_cell) == list(definitions.CELL)
    assert (of_cell["requests"], of_cell["requests_connect_error"], of_cell["requests_timeout"]) == (2, 1, 1)
    unknown = {name for name, value in of_cell.items() if value is None}
    assert unknown >= {
        "throughput_full_tok_s",
        "ttft_p50_s",
        "itl_mean_s",
        "user_speed_tok_s",
        "wall_s",
        "accept_length",
    }


def test_fault_22_prompt_tokens_are_in_no_throughput() -> None:
    of_cell = cell(steady_stream(100, 0.01, first=0.01, prompt_tokens=100_000))
    assert of_cell["throughput_full_tok_s"] == approx(100)
    assert of_cell["prompt_tokens"] == 100_000


def test_fault_23_equal_texts_have_equal_digests_whatever_the_events_were() -> None:
    ar = [row([(0.1, "a", 1), (0.2, "bc", 3)], tokens=3), row([(0.1, "d", 1)], tokens=1, index=1)]
    tree = [row([(0.1, "abc", 3)], tokens=3), row([(0.1, "d", 1)], tokens=1, index=1)]
    other = [row([(0.1, "ab", 3)], tokens=3), row([(0.1, "cd", 1)], tokens=1, index=1)]
    assert cell(*ar)["texts_sha256"] == cell(*tree[::-1])["texts_sha256"] != cell(*other)["texts_sha256"]
    shas = [metrics.request_metrics(frame(*rows))["text_sha256"] for rows in (ar, tree, other)]
    assert (shas[0] == shas[1]).tolist() == [True, True]
    assert (shas[0] == shas[2]).tolist() == [False, False]


@pytest.mark.parametrize("kind", ["request", "cell"])
def test_every_metric_is_defined(kind: str) -> None:
    rows = frame(steady_stream(4, 0.1, spec=details([1, 1])))
    names = (
        list(metrics.request_metrics(rows))
        if kind == "request"
        else list(metrics.cell_metrics(rows, Load(1), "DDTREE"))
    )
    assert names == list(definitions.REQUEST if kind == "request" else definitions.CELL)


def test_metrics_are_the_same_from_a_file_read_without_the_schema(tmp_path: Any) -> None:
    rows = frame(steady_stream(400, 0.01, spec=details([1, 1])), failed("timeout", index=1, completion_tokens=None))
    requests_table.write(rows, tmp_path / "r.parquet")
    plain = pd.read_parquet(tmp_path / "r.parquet")
    assert metrics.cell_metrics(plain, Load(1), "DFLASH") == metrics.cell_metrics(rows, Load(1), "DFLASH")
    pd.testing.assert_frame_equal(metrics.request_metrics(plain), metrics.request_metrics(rows), check_dtype=False)


# Percentiles


def test_least_n_is_that_of_the_definition() -> None:
    assert [least_n(p) for p in (50, 90, 99)] == [1, 36, 368]


def test_nearest_rank_by_hand() -> None:
    values = [15, 20, 35, 40, 50]
    assert [nearest_rank(values, p) for p in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]
    assert nearest_rank([], 50) is None
    assert nearest_rank(range(1, 101), 99) == 99
    assert nearest_rank([1.0, 5.0, 9.0], 90, weights=[1, 8, 1]) == 5.0


def test_few_values_have_no_high_percentile() -> None:
    assert summary("x", range(35))["x_p90_s"] is None
    assert summary("x", range(36))["x_p90_s"] == 32
    assert summary("x", range(367))["x_p99_s"] is None
    assert summary("x", range(368))["x_p99_s"] == 364


def test_itl_percentiles_weigh_by_tokens_and_are_given_by_events() -> None:
    """35 gaps hold 350 tokens: no p90. With one more there is one."""
    few = [(0.1 * i, "x", 1 + 10 * i) for i in range(36)]
    many = [(0.1 * i, "x", 1 + 10 * i) for i in range(37)]
    assert cell(row(few, tokens=351))["itl_p90_s"] is None
    assert cell(row(many, tokens=361))["itl_p90_s"] == approx(0.01)


# Properties

events_ = st.lists(
    st.tuples(st.floats(0.001, 2.0), st.integers(1, 12), st.integers(0, 6), st.booleans()), min_size=1, max_size=30
)


@law(events=events_, eos=st.integers(0, 1))
def test_itl_sums_to_the_time_between_first_and_last_event_and_counts_to_n(events: list[Any], eos: int) -> None:
    moments = np.cumsum([gap for gap, *_ in events])
    so_far = 1 + np.cumsum([0, *(n for _, _, n, _ in events[1:])])
    counted = all(flag for *_, flag in events)
    raw = row(
        [(float(t), "x" * e[1], int(n) if counted else None) for t, e, n in zip(moments, events, so_far, strict=True)],
        tokens=int(so_far[-1]) + eos,
    )
    given_ = answer(raw)
    assert given_ is not None
    assert given_.tokens.counts is not None
    assert given_.tokens.counts.sum() == given_.tokens.total == so_far[-1] + eos
    assert (given_.tokens.counts >= 0).all()
    latencies, tokens = given_.itl_s()
    if given_.tokens.counts[1:].sum():
        assert (latencies * tokens).sum() == approx(moments[-1] - moments[0])
        assert tokens.sum() == given_.tokens.counts[1:].sum()
    else:
        assert not latencies.size


@law(tokens=st.integers(0, 200), texts=st.lists(st.text(max_size=9), min_size=1, max_size=40))
def test_shares_by_text_sum_to_all_tokens_and_leave_no_event_without_one(tokens: int, texts: list[str]) -> None:
    counts = share_by_text(tokens, [len(text) for text in texts])
    assert counts.sum() == tokens
    assert counts.min() >= (1 if tokens >= len(texts) else 0)


@law(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), min_size=1, max_size=60))
def test_the_peak_is_never_below_the_mean_over_whole_seconds(events: list[tuple[float, int]]) -> None:
    times, tokens = np.array([t for t, _ in events]), np.array([n for _, n in events])
    span = times.max() - times.min()
    peak = peak_throughput(times, tokens)
    assert peak >= tokens.sum() / (math.floor(span) + 1)
    assert peak in {tokens[(times >= start) & (times < start + 1)].sum() for start in times}


@law(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(1, 100))
def test_nearest_rank_is_the_least_value_that_covers_the_share(values: list[float], percent: int) -> None:
    found = nearest_rank(values, percent)
    assert found == sorted(values)[-(-percent * len(values) // 100) - 1]
