"""Open loops, objectives, and the content of metrics.json with its checks, by hand."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest
from raw_rows import details, failed, frame, row, steady_stream

from ddtree_bench import metrics
from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.metrics import Slos, definitions, document_keys
from ddtree_bench.plan import Load

approx = pytest.approx

ONE = Load(1)
OPEN = Load(64, "open", 2.0, "constant")
QUIET: dict[str, float | int | bool | None] = {"wall_s": 10.0, "reader_wait_s": 0.0}


def cell(*rows: dict[str, Any], load: Load = ONE, method: str | None = "AR", slos: Slos | None = None) -> Any:
    return metrics.cell_metrics(frame(*rows), load, method, slos)


def arriving(n: int, late: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    """Requests that are to start every 0.5 s and start `late`; 11 tokens, the first after 0.2 s, the last after 1.2."""
    return [
        steady_stream(11, 0.1, first=0.2, t_send=0.5 * i + late, index=i, intended_start=0.5 * i, **fields)
        for i in range(n)
    ]


def document(*rows: dict[str, Any], load: Load = ONE, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "client": QUIET,
        "server_samples": server_samples.frame([]),
        "counters": None,
        "planned": len(rows),
        "aborted": None,
    }
    found = metrics.document(frame(*rows), load, **(given | fields))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def check(found: dict[str, Any], name: str) -> tuple[bool | None, str]:
    (one,) = [one for one in found["checks"] if one["name"] == name]
    return one["ok"], one["detail"]


# Open loop


def test_the_steady_window_of_an_open_loop_begins_warm_and_ends_with_the_last_arrival() -> None:
    """20 arrivals from 0 to 9.5 s, each 1.2 s long: the window is 1.2 to 9.5 s, at 2 x 11 tokens/s."""
    found = cell(*arriving(20), load=OPEN)
    assert found["steady_window_s"] == approx(8.3)
    assert found["throughput_window"] == "steady"
    assert found["throughput_steady_tok_s"] == approx(22, rel=0.03)
    assert found["arrivals_per_s"] == approx(2.0)
    assert found["mean_in_flight"] == approx(20 * 1.201 / 10.701)


def test_an_open_loop_is_warm_when_nine_of_ten_of_its_first_requests_would_have_ended() -> None:
    """Requests of 1.2 s and, one in five, of 2.2 s: warm after 2.2 s."""
    rows = arriving(20)
    for i in range(0, 20, 5):
        rows[i] = steady_stream(21, 0.1, first=0.2, t_send=0.5 * i, index=i, intended_start=0.5 * i)
    assert cell(*rows, load=OPEN)["steady_window_s"] == approx(9.5 - 2.2)
    rows[5:] = arriving(20)[5:]
    assert cell(*rows, load=OPEN)["steady_window_s"] == approx(9.5 - 1.2)


def test_an_open_loop_that_was_over_before_it_was_warm_has_no_steady_window() -> None:
    found = cell(*arriving(3), load=OPEN)
    assert (found["steady_window_s"], found["throughput_window"]) == (None, "full")


def test_a_failed_request_leaves_the_steady_window_of_an_open_loop() -> None:
    rows = [*arriving(20), failed("timeout", index=20, t_send=3.0, intended_start=3.0, t_end=300.0)]
    assert cell(*rows, load=OPEN)["steady_window_s"] == approx(8.3)


def test_latencies_of_an_open_loop_count_from_the_scheduled_start_as_well() -> None:
    found = cell(*arriving(40, late=0.3), load=OPEN)
    assert (found["ttft_mean_s"], found["ttft_from_intended_mean_s"]) == (approx(0.2), approx(0.5))
    assert (found["e2e_p90_s"], found["e2e_from_intended_p90_s"]) == (approx(1.2), approx(1.5))
    assert found["e2e_from_intended_p99_s"] is None
    closed = cell(steady_stream(4, 0.1))
    assert [closed[f"{name}_from_intended_mean_s"] for name in ("ttft", "e2e")] == [None, None]


def test_a_request_that_never_found_a_connection_was_in_flight_at_no_time() -> None:
    lost = failed("connect_error", index=1, t_send=0.0, t_sent=0.0, t_end=50.0)
    found = cell(steady_stream(10, 0.1), lost)
    assert (found["mean_in_flight"], found["most_in_flight"]) == (approx(1.0), 1)


# Objectives


def test_goodput_counts_the_requests_that_meet_every_objective() -> None:
    """Wall 4.2 s: TTFT 0.2 and 0.9 s, TPOT 0.1 and 0.1 s/token."""
    rows = [
        steady_stream(11, 0.1, first=0.2),
        steady_stream(11, 0.1, first=0.9, t_send=2.3, index=1),
        failed("timeout", index=2),
    ]
    assert cell(*rows, slos=Slos(ttft_s=0.5))["goodput_req_s"] == approx(1 / 4.2)
    assert cell(*rows, slos=Slos(ttft_s=0.9001, tpot_s=0.11))["goodput_req_s"] == approx(2 / 4.2)
    assert cell(*rows, slos=Slos(ttft_s=0.5, tpot_s=0.09))["goodput_req_s"] == 0
    assert cell(*rows, slos=Slos(e2e_s=1.5))["slo_met"] == 1
    assert cell(*rows)["requests_per_s"] == approx(2 / 4.2)


@pytest.mark.parametrize("slos", [None, Slos()])
def test_without_an_objective_there_is_no_goodput(slos: Slos | None) -> None:
    found = cell(steady_stream(4, 0.1), slos=slos)
    assert (found["slo_met"], found["goodput_req_s"]) == (None, None)


def test_goodput_when_every_request_failed_is_nothing() -> None:
    assert cell(failed("timeout"), slos=Slos(ttft_s=1.0))["goodput_req_s"] == 0.0
    assert cell(slos=Slos(ttft_s=1.0))["goodput_req_s"] is None


def test_an_objective_of_tpot_is_not_applied_to_an_answer_in_one_event_and_not_met_with_n_unknown() -> None:
    at_once = row([(1.0, "all of it", 9)], tokens=9)
    unknown = row([(1.0, "one", None), (2.0, "two", None)], tokens=None)
    strict = Slos(tpot_s=1e-6)
    assert cell(at_once, slos=strict)["slo_met"] == 1
    assert cell(unknown, slos=Slos(tpot_s=9.0))["slo_met"] == 0
    assert cell(unknown, slos=Slos(ttft_s=1.5))["slo_met"] == 1


def test_objectives_of_an_open_loop_count_from_the_scheduled_start() -> None:
    rows = arriving(4, late=0.3)
    assert cell(*rows, load=OPEN, slos=Slos(ttft_s=0.4))["slo_met"] == 0
    assert cell(*rows, load=OPEN, slos=Slos(ttft_s=0.51, e2e_s=1.51))["slo_met"] == 4
    assert cell(*rows, load=OPEN, slos=Slos(e2e_s=1.4))["slo_met"] == 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_an_objective_must_be_above_nothing(value: float) -> None:
    with pytest.raises(ValueError, match=r"tpot_s: .*; an objective must be above 0 s"):
        Slos(tpot_s=value)


# A method that is not known


def test_an_unknown_method_is_ar_where_the_server_says_that_there_were_no_rounds() -> None:
    none = {"spec_verify_ct": 0, "spec_correct_drafts_histogram": None}
    plain = cell(steady_stream(10, 0.02, spec=none), method=None)
    assert (plain["round_time_s"], plain["accept_length"], plain["identity_broken"]) == (approx(0.02), None, None)
    silent = cell(steady_stream(10, 0.02), method=None)
    assert (silent["round_time_s"], silent["rounds"]) == (None, None)
    drafted = cell(steady_stream(5, 0.02, spec=details([1, 0, 1])), method=None)
    assert (drafted["accept_length"], drafted["round_time_s"]) == (approx(2), approx(0.04))


# metrics.json


def test_the_document_has_the_cells_numbers_under_its_own_names() -> None:
    rows = [steady_stream(400, 0.01, t_send=4.2 * i, index=i, spec=details([0, 133, 133])) for i in range(2)]
    of_cell, found = cell(*rows, method="DDTREE"), document(*rows, method="DDTREE", slos=Slos(ttft_s=0.2))
    assert (found["status"], found["reason"]) == ("ok", None)
    assert found["requests"] == dict.fromkeys(requests_table.STATUSES, 0) | {"ok": 2}
    assert (found["requests_planned"], found["requests_not_sent"]) == (2, 0)
    assert found["throughput_tok_s"] == of_cell["throughput_full_tok_s"]
    assert found["peak_tok_s"] == of_cell["peak_throughput_tok_s"]
    assert found["per_user_tok_s"] == of_cell["user_speed_tok_s"]
    assert found["throughput_window"] == "steady"
    assert found["itl_s"] == {
        "mean": of_cell["itl_mean_s"],
        "p50": of_cell["itl_p50_s"],
        "p90": approx(0.01),
        "p99": approx(0.01),
    }
    assert found["ttft_s"]["p90"] is None
    assert found["accept_length"] == of_cell["accept_length"] == approx(2 * 399 / (2 * 266))
    assert found["acceptance_by_depth"] == [1.0, 0.5]
    assert found["goodput"] == found["requests_per_s"] == approx(2 / of_cell["wall_s"])
    assert found["load"] == {"concurrency": 1, "kind": "closed", "rate": None, "arrivals": None}
    assert found["slos"] == {"ttft_s": 0.2, "tpot_s": None, "e2e_s": None}
    assert "ttft_from_intended_s" not in found


def test_no_metric_of_a_cell_is_lost_on_the_way_to_the_document() -> None:
    found = document(*arriving(20), load=OPEN)
    flat = {
        f"{name.removesuffix('_s')}_{one}_s"
        for name, value in found.items()
        if isinstance(value, dict)
        for one in value
    }
    renamed = {"throughput_full_tok_s", "peak_throughput_tok_s", "user_speed_tok_s", "goodput_req_s"}
    counts = {"requests", *(f"requests_{status}" for status in requests_table.STATUSES)}
    assert set(definitions.CELL) - set(found) - flat == renamed | counts - {"requests"}


def test_every_key_of_the_document_is_documented() -> None:
    counted = {"values": {"generation_tokens_total": 220.0}, "missing": {}, "notes": []}
    found = document(*arriving(20), load=OPEN, counters=counted)
    sections = {"requests", "client", "server", "checks"}
    top = document_keys.TOP | document_keys.PLANNED | document_keys.values() | document_keys.ACCEPTANCE
    assert set(found) == set(top) | sections
    assert set(found["requests"]) == set(document_keys.REQUESTS)
    assert set(found["client"]) <= set(document_keys.CLIENT)
    assert set(found["server"]) == set(document_keys.SERVER)
    page = document_keys.page()
    assert all(f"| `{one['name']}` | " in page for one in found["checks"])
    assert "| `tpot_s` | object | s/token | Time per output token after the first event, over the ok requests" in page
    assert "| `peak_tok_s` | float | tokens/s | Most output tokens in any 1 s; NA below 3 s of wall. |" in page


def test_an_open_loop_has_latencies_from_the_scheduled_start() -> None:
    found = document(*arriving(20, late=0.3), load=OPEN)
    assert found["ttft_from_intended_s"]["mean"] == approx(0.5)
    assert found["e2e_from_intended_s"]["p50"] == approx(1.5)


@pytest.mark.parametrize(
    ("rows", "planned", "aborted", "status", "reason"),
    [
        ([steady_stream(4, 0.1)], 1, None, "ok", None),
        ([steady_stream(4, 0.1)], 3, None, "partial", "1 of 3 requests were ok (2 not sent)"),
        ([steady_stream(4, 0.1)], 1, "interrupted", "partial", "interrupted"),
        (
            [steady_stream(4, 0.1), failed("timeout", index=1), failed("empty", index=2)],
            4,
            "the server is gone",
            "partial",
            "the server is gone; 1 of 4 requests were ok (1 timeout, 1 empty, 1 not sent)",
        ),
        ([failed("timeout")], 1, None, "failed", "0 of 1 requests were ok (1 timeout)"),
        ([], 2, None, "failed", "0 of 2 requests were ok (2 not sent)"),
        ([], 0, None, "failed", "no request was sent"),
    ],
)
def test_the_status_of_a_cell_and_its_reason(
    rows: list[dict[str, Any]], planned: int, aborted: str | None, status: str, reason: str | None
) -> None:
    found = document(*rows, planned=planned, aborted=aborted)
    assert (found["status"], found["reason"]) == (status, reason)
    assert check(found, "complete")[0] is (found["requests"]["ok"] == planned)


def test_every_check_is_there_also_when_nothing_was_measured() -> None:
    names = [one["name"] for one in document(planned=2)["checks"]]
    assert len(names) == len(set(names)) == 14
    assert names[-1] == "client_healthy"


@pytest.mark.parametrize(("server", "ok"), [(2000, True), (2020, True), (2021, False), (1979, False)])
def test_the_clients_tokens_and_the_servers_agree_within_one_percent(server: float, ok: bool) -> None:
    rows = [steady_stream(1900, 0.001), steady_stream(100, 0.001, index=1, status="truncated")]
    counted = {"values": {"generation_tokens_total": server}, "missing": {}}
    assert check(document(*rows, counters=counted), "tokens_agree")[0] is ok


def test_tokens_that_cannot_be_compared_say_why() -> None:
    reset = {"values": {}, "missing": {"generation_tokens_total": "the counter fell: the server was started again"}}
    found = document(steady_stream(4, 0.1), counters=reset)
    assert check(found, "tokens_agree") == (
        None,
        "the server's count is not known: the counter fell: the server was started again",
    )
    assert found["server"]["missing"] == reset["missing"]
    assert check(document(steady_stream(4, 0.1)), "tokens_agree")[0] is None


def load_checks(running: list[float], queued: list[float], concurrency: int = 8) -> list[bool | None]:
    """What the two checks of the load say, with 8 requests in flight for 10 s and two samples each second."""
    rows = [steady_stream(100, 0.1, index=i) for i in range(8)]
    samples = [(i / 2 + 0.25, r, q) for i, (r, q) in enumerate(zip(running, queued, strict=True))]
    found = document(*rows, load=Load(concurrency), server_samples=server_samples.frame(samples))
    return [check(found, name)[0] for name in ("delivered_load", "admitted")]


def test_the_load_that_the_server_saw() -> None:
    assert load_checks([8.0] * 9, [0.0] * 9) == [True, True]
    assert load_checks([7.0] * 18, [0.0] * 18) == [False, None]
    assert load_checks([6.0] * 9, [2.0] * 9) == [True, None]
    assert load_checks([6.0] * 10, [2.0] * 10) == [True, False]  # fault 11: the rest only queues
    assert load_checks([8.0, 8.0], [0.0, 0.0]) == [None, None]
    assert load_checks([8.0, 2.0, 8.0, 8.0], [0.0] * 4) == [None, True]
    assert load_checks([float("nan")] * 9, [0.0] * 9) == [None, None]


def test_samples_before_and_after_the_load_are_left_out() -> None:
    rows = [steady_stream(100, 0.1)]
    others = 5.0
    samples = server_samples.frame([(t, 1.0 if 0 < t < 10 else others, 0.0) for t in (-1, 1, 2, 3, 11, 12)])
    assert check(document(*rows, server_samples=samples), "delivered_load")[0] is True


def test_in_an_open_loop_requests_may_wait_on_the_server() -> None:
    samples = server_samples.frame([(float(t), 1.0, 1.4) for t in range(2, 9)])
    assert check(document(*arriving(20), load=OPEN, server_samples=samples), "admitted")[0] is None


@pytest.mark.parametrize(
    ("rows", "load", "ok", "words"),
    [
        ([steady_stream(10, 0.1)], Load(1), True, "100% of the tokens"),
        ([steady_stream(10, 0.1)], Load(4), False, "at most 1 of 4"),
        ([steady_stream(10, 0.1), failed("empty", index=1, t_send=1.0)], Load(1), True, "100% of the tokens"),
        (arriving(3), OPEN, False, "before nine of ten would have ended; send more requests"),
        ([failed("empty")], Load(1), None, "no throughput"),
    ],
)
def test_whether_there_is_a_steady_window(rows: Any, load: Load, ok: bool | None, words: str) -> None:
    found = check(document(*rows, load=load), "steady_window")
    assert found[0] is ok
    assert words in found[1]


def test_checks_of_speculation() -> None:
    good = steady_stream(5, 0.1, spec=details([1, 0, 1], spec_tree_nodes=16, spec_tree_branching_nodes=2))
    broken = steady_stream(9, 0.1, index=1, spec=details([1, 0, 1], spec_tree_nodes=16, spec_tree_branching_nodes=0))
    found = document(good, broken, method="DDTREE")
    assert check(found, "identity")[0] is False
    assert check(found, "tree_branches") == (True, "8.00 nodes a round, 0.50 with two children or more")
    chain = document(broken, method="DDTREE")
    assert check(chain, "tree_branches")[0] is False
    plain = document(steady_stream(5, 0.1), method="AR")
    assert [check(plain, name)[0] for name in ("identity", "tree_branches")] == [None, None]
    assert check(document(good, method="DDTREE"), "identity")[0] is True


def test_prompts_that_were_sent_before_and_those_that_were_cached() -> None:
    rows = [steady_stream(4, 0.1, index=i, prompt_sha256="0" * 64, prompt_tokens=100) for i in range(3)]
    assert check(document(*rows), "prompts_repeated") == (False, "2 of 3 requests had a prompt that was sent before")
    assert check(document(*rows), "cached_prompts")[0] is True
    hit = steady_stream(4, 0.1, index=3, prompt_tokens=100, cached_prompt_tokens=99)
    assert check(document(*rows, hit), "cached_prompts")[0] is False
    untold = steady_stream(4, 0.1, index=3, cached_prompt_tokens=None)
    assert check(document(*rows, untold), "cached_prompts") == (None, "3 of 4 answers tell of cached prompt tokens")


def test_lengths_against_max_tokens() -> None:
    assert check(document(steady_stream(4, 0.1, max_tokens=4)), "lengths")[0] is True
    assert check(document(steady_stream(4, 0.1, max_tokens=8)), "lengths")[0] is False
    assert check(document(steady_stream(4, 0.1, max_tokens=8, finish_reason="stop")), "lengths")[0] is True
    assert check(document(steady_stream(4, 0.1, max_tokens=3, finish_reason="stop")), "lengths")[0] is False
    assert check(document(row([(1.0, "x", None)], tokens=None)), "lengths")[0] is None


def test_tokens_that_are_not_known_fail_their_check() -> None:
    found = check(document(row([(1.0, "x", None)], tokens=None)), "tokens_known")
    assert found == (
        False,
        "the server sent no usage at the end of some answers; give a tokenizer to count their tokens",
    )
    assert check(document(steady_stream(4, 0.1)), "tokens_known")[0] is True


# Files


def test_a_file_with_metrics_beside_the_raw_columns_gives_both_back(tmp_path: Any) -> None:
    rows = frame(steady_stream(4, 0.1, spec=details([1, 1])), failed("timeout", index=1, completion_tokens=None))
    requests_table.write(rows, tmp_path / "r.parquet", metrics.request_metrics(rows))
    pd.testing.assert_frame_equal(requests_table.read(tmp_path / "r.parquet"), rows)
    plain = pd.read_parquet(tmp_path / "r.parquet")
    assert plain[["status", "output_tokens", "rounds"]].iloc[0].tolist() == ["ok", 4, 2]
    assert plain["ttft_s"].iloc[0] == approx(0.1)
    assert plain.columns.is_unique
    assert set(definitions.REQUEST) | set(requests_table.SCHEMA.names) == set(plain.columns)


def test_a_file_of_before_the_newer_columns_is_read_and_measured(tmp_path: Any) -> None:
    rows = frame(steady_stream(4, 0.1, spec=details([1, 1])), failed("timeout", index=1))
    older = rows.drop(columns=list(requests_table.ADDED))
    older.to_parquet(tmp_path / "r.parquet")
    read = requests_table.read(tmp_path / "r.parquet")
    assert list(read.columns) == requests_table.SCHEMA.names
    assert read[list(requests_table.ADDED)].isna().all(axis=None)
    for found in (read, older):
        assert metrics.cell_metrics(found, Load(1), "DFLASH") == metrics.cell_metrics(rows, Load(1), "DFLASH")
        assert metrics.request_metrics(found)["retries"].isna().all()


def test_a_file_of_something_else_is_refused(tmp_path: Any) -> None:
    pd.DataFrame({"index": [1]}).to_parquet(tmp_path / "r.parquet")
    with pytest.raises(ValueError, match=r"not a table of requests, it has no column .*'prompt_id'"):
        requests_table.read(tmp_path / "r.parquet")


def test_parsed_requests_stand_for_the_frame() -> None:
    rows = frame(steady_stream(4, 0.1, spec=details([1, 1])), failed("timeout", index=1))
    parsed = metrics.parse(rows)
    assert metrics.cell_metrics(parsed, Load(1), "DFLASH") == metrics.cell_metrics(rows, Load(1), "DFLASH")
    pd.testing.assert_frame_equal(metrics.request_metrics(parsed), metrics.request_metrics(rows))
    pd.testing.assert_frame_equal(metrics.acceptance_by_depth(parsed), metrics.acceptance_by_depth(rows))
