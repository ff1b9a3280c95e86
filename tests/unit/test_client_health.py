"""What the client says about itself, on rows whose moments and lags are chosen by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_rows import failed, frame, row, steady_stream

from ddtree_bench.metrics import Slos, cell_metrics, parse
from ddtree_bench.metrics.client_health import Health, health
from ddtree_bench.metrics.client_share import client_share
from ddtree_bench.metrics.differences import differences, statistics
from ddtree_bench.metrics.parsed import Request
from ddtree_bench.plan import Load

GAP, FIRST, EVENTS = 0.02, 0.1, 40
E2E = FIRST + (EVENTS - 1) * GAP
CLIENT = {
    "wall_s": 10.0,
    "reader_wait_s": 0.01,
    "reader_slices": 1000,
    "cpu_s": 0.5,
    "reader_cpu_s": 0.3,
    "events_read": 10_000,
}
NOTHING_KNOWN = {"wall_s": 10.0, "reader_wait_s": None, "reader_slices": None}
CLOSED = Load(4)


def cell(lag_s: float | np.ndarray = 1e-4, turnaround_s: float = 1e-4, each: int = 2, **fields: Any) -> pd.DataFrame:
    """Four users, 5 ms apart, with `each` requests of E2E s one after another; every event is read `lag_s` late."""
    lags = np.broadcast_to(np.asarray(lag_s, dtype=float), EVENTS)
    rows = []
    for user in range(4):
        send = 100.0 + 0.005 * user
        for _ in range(each):
            own = steady_stream(EVENTS, GAP, t_send=send, index=len(rows), worker=user, **fields)
            event_lags = np.append(lags, [lags[-1]] * 2)
            moments = own["event_times"] + event_lags
            own |= {"event_times": moments, "event_lags": event_lags, "t_end": moments[-1]}
            rows.append(own)
            send = own["t_end"] + turnaround_s
    return frame(*rows)


def error(found: Health, name: str) -> float:
    return next(one.value for one in found.errors if one.name == name)


def test_quiet_client_is_healthy() -> None:
    found = health(cell(), CLIENT, CLOSED)
    assert found.ok is True
    assert error(found, "ttft_mean_s") == pytest.approx(1e-4, rel=1e-3)
    assert error(found, "itl_mean_s") == pytest.approx(0, abs=1e-9)
    assert found.detail.endswith("by the kernel's receive stamps of 100% of the events")


def test_late_first_events_fail_the_ttft() -> None:
    lags = np.full(EVENTS, 1e-4)
    lags[0] = 0.005
    found = health(cell(lags), CLIENT, CLOSED)
    assert found.ok is False
    assert found.errors[0].name == "ttft_mean_s"
    assert found.errors[0].value == pytest.approx(0.005, rel=1e-3)
    assert "5 ms of ttft_mean_s (limit 2 ms)" in found.detail


def test_late_first_events_of_few_requests_fail_only_what_they_move() -> None:
    requests = cell(each=10)
    for n in range(3):  # of 40: more than a tenth of them would be needed to move p90
        requests.at[n, "event_lags"] = np.concatenate([[0.03], requests.at[n, "event_lags"][1:]])
        requests.at[n, "event_times"] = requests.at[n, "event_times"] + np.array([0.0299, *[0] * (EVENTS + 1)])
    found = health(requests, CLIENT, CLOSED)
    assert error(found, "ttft_mean_s") == pytest.approx(1e-4 + 3 * 0.0299 / 40, rel=1e-3)
    assert error(found, "ttft_p90_s") == pytest.approx(1e-4, rel=1e-3)
    assert found.ok is False


def test_slow_turnaround_fails_the_throughput() -> None:
    each, turnaround = 10, 0.05 * E2E
    found = health(cell(turnaround_s=turnaround, each=each), CLIENT, CLOSED)
    assert found.ok is False
    assert found.errors[0].is_rate
    share = (each - 1) * turnaround / (each * E2E + 0.015)
    assert error(found, "throughput_full_tok_s") == pytest.approx(1 / (1 + share) - 1, rel=0.05)
    assert "requests_per_s (limit 1%)" in found.detail or "tok_s (limit 1%)" in found.detail
    assert error(found, "ttft_mean_s") < 2e-4


def test_an_event_at_the_edge_of_the_steady_window_is_no_error_of_the_client() -> None:
    """The second user's send opens the window 10 us before, or after, an event of 8 tokens of the first."""

    def account(edge: float) -> pd.DataFrame:
        users = []
        for user, t_send in enumerate((0.0, 0.2)):
            events = [(t_send + 0.1 * i, "w " * 8, 8 * i) for i in range(1, 11)]
            users.append(row(events, t_send=t_send, tokens=80, index=user, worker=user))
        users[0]["event_times"][1] = 0.2 + edge
        return frame(*users)

    seen, true = (cell_metrics(account(edge), Load(2), None) for edge in (1e-5, -1e-5))
    assert seen["throughput_steady_tok_s"] / true["throughput_steady_tok_s"] > 1.05
    apart = {one.name: one for one in differences(parse(account(1e-5)), parse(account(-1e-5)), Load(2))}
    assert apart["throughput_steady_tok_s"].value == 0.0


@pytest.mark.parametrize("prompt_tokens", [5, 50_000])
def test_time_to_send_counts_unless_the_kernel_took_no_more(prompt_tokens: int) -> None:
    slow = cell(turnaround_s=0.0, prompt_tokens=prompt_tokens).assign(t_sent=lambda rows: rows["t_send"] + 0.004)
    assert error(health(slow, CLIENT, CLOSED), "ttft_mean_s") == pytest.approx(0.0041, rel=1e-3)
    partly = health(slow.assign(send_blocked_s=0.003), CLIENT, CLOSED)
    assert error(partly, "ttft_mean_s") == pytest.approx(0.0011, rel=1e-3)
    assert partly.send_late_s["p50"] == pytest.approx(0.001, rel=1e-6)
    assert health(slow.assign(send_blocked_s=0.004), CLIENT, CLOSED).ok is True


def late_ends(end_lag: float | None) -> pd.DataFrame:
    """The client reads the end of every answer, which came as a read of its own, 40 ms late."""
    rows = cell(turnaround_s=0.0, each=10).astype({"end_lag": float})
    late = 0.04 * (rows["index"] % 10).astype(float)
    return rows.assign(
        t_send=rows["t_send"] + late,
        t_sent=rows["t_sent"] + late,
        t_end=rows["t_end"] + late + 0.04,
        event_times=[times + own for times, own in zip(rows["event_times"], late, strict=True)],
        end_lag=end_lag,
    )


def test_an_end_that_is_read_late_fails_the_throughput() -> None:
    found = health(late_ends(0.04), CLIENT, CLOSED)
    assert found.ok is False
    share = 9 * 0.04 / (10 * E2E + 0.015)
    assert error(found, "throughput_full_tok_s") == pytest.approx(1 / (1 + share) - 1, rel=0.02)
    # The server sent it late: nothing of it is the client's.
    assert health(late_ends(0.0), CLIENT, CLOSED).errors[0].name != "throughput_full_tok_s"


def test_an_end_without_a_lag_has_that_of_its_last_event() -> None:
    rows = cell(lag_s=0.001, turnaround_s=0.0)
    for end_lag in (None, np.nan, 0.001):
        share = client_share(rows.assign(end_lag=end_lag), CLOSED)
        assert share.late[1] == pytest.approx(0.001, rel=1e-6)


def stalled(begin: float, end: float) -> pd.DataFrame:
    """16 users; the client reads nothing from `begin` to `end`."""
    rows = []
    for user in range(16):
        send = 100 + 0.005 * user
        for _ in range(4):
            own = steady_stream(100, GAP, t_send=send, index=len(rows), worker=user)
            times, lags = np.array(own["event_times"]), np.full(102, 1e-4)
            waiting = (times >= begin) & (times < end)
            if waiting.any():
                lags[waiting], times[waiting] = end - times[waiting].max(), end
            send = own["t_end"] + 1e-4
            rows.append(own | {"event_times": times, "event_lags": lags, "end_lag": 0.0})
    return frame(*rows)


def test_a_stall_fails_the_peak() -> None:
    load = Load(16)
    assert health(stalled(0, 0), CLIENT, load).ok is True
    found = health(stalled(104.0, 104.4), CLIENT, load)
    assert found.ok is False
    assert error(found, "peak_throughput_tok_s") > 0.1
    assert abs(error(found, "throughput_full_tok_s")) < 0.001


def test_the_edge_of_the_peaks_window_is_not_the_clients_doing() -> None:
    """A server that sends to all at once, 20 ms apart: a second holds 50 or 51 times as many tokens as users."""
    lags = np.where(np.arange(200) < 70, 1e-4, 0.0)
    events = [(i * 0.020001 + lag, "w ", i + 1) for i, lag in enumerate(lags)]
    alike = {"t_send": -0.1, "tokens": 200, "event_lags": np.append(lags, [0, 0])}
    rows = frame(*(row(events, index=n, worker=n, **alike) for n in range(4)))
    without = client_share(rows, CLOSED).without_client
    peaks = [cell_metrics(one, CLOSED, None)["peak_throughput_tok_s"] for one in (rows, without)]
    assert peaks == [204, 200]
    found = health(rows, CLIENT, CLOSED)
    assert error(found, "peak_throughput_tok_s") == 0
    assert found.ok is True


def test_an_objective_just_missed_fails_the_goodput() -> None:
    late = cell(lag_s=0.0015, each=10)
    assert health(late, CLIENT, CLOSED).ok is True
    found = health(late, CLIENT, CLOSED, Slos(ttft_s=0.101))
    assert (found.ok, error(found, "goodput_req_s")) == (False, -1)
    assert health(late, CLIENT, CLOSED, Slos(ttft_s=0.11)).ok is True


def test_the_speed_of_a_stream_is_judged_by_its_share() -> None:
    """A gap of 3 ms and every other event 1.5 ms late: below 2 ms, and half of the latency."""
    lags = np.tile([0.0, 0.0015], 20)
    rows = [
        own | {"event_times": own["event_times"] + np.append(lags, [0, 0]), "event_lags": np.append(lags, [0, 0])}
        for own in (steady_stream(EVENTS, 0.003, t_send=0.2 * n, index=n, worker=n) for n in range(4))
    ]
    found = health(frame(*rows), CLIENT, CLOSED)
    assert found.ok is False
    assert found.errors[0].name == "itl_p50_s"
    assert found.errors[0].limit == pytest.approx(3e-5, rel=1e-3)
    assert abs(found.errors[0].value) == pytest.approx(0.0015, rel=1e-3)


def test_connecting_anew_and_retries_are_not_the_clients_share() -> None:
    anew = cell(turnaround_s=0.2, each=10)
    assert health(anew, CLIENT, CLOSED).ok is False
    assert health(anew.assign(connect_s=0.2), CLIENT, CLOSED).ok is True
    assert health(anew.assign(retries=pd.array([1] * len(anew), dtype="Int64")), CLIENT, CLOSED).ok is True


def sends_of(requests: Sequence[Request]) -> np.ndarray:
    return np.array([one.answer.t_send for one in requests if one.answer])


def test_turnaround_of_the_whole_chain_is_taken_out() -> None:
    share = client_share(cell(lag_s=0.001, turnaround_s=0.1, each=3), CLOSED)
    sends = sends_of(share.without_client)
    starts = sends.reshape(4, 3) - sends.min()
    assert starts[0] == pytest.approx([0, E2E + 0.0005, 2 * (E2E + 0.0005)], abs=1e-6)
    assert starts[3] - starts[0] == pytest.approx([0.015] * 3, abs=1e-6)


def without_stamps(requests: pd.DataFrame) -> pd.DataFrame:
    return requests.assign(event_lags=[np.full(len(lags), np.nan, np.float32) for lags in requests["event_lags"]])


@pytest.mark.parametrize(
    ("client", "ok"),
    [
        ({}, True),
        ({"reader_wait_s": 0.05}, True),
        ({"reader_wait_s": 0.07}, False),
        ({"cpu_s": 2.9}, True),
        ({"cpu_s": 3.1}, None),
        ({"cpu_s": 9.1}, False),
        ({"reader_wait_s": 0.0, "cpu_s": 9.99, "reader_cpu_s": 9.98}, False),
        ({"reader_cpu_s": 2.5, "events_read": 5000}, None),
        ({"events_read": None}, None),
        ({"cpu_s": None}, None),
    ],
)
def test_without_stamps_what_the_reader_did_decides(client: dict[str, float | None], ok: bool | None) -> None:
    """0.5 ms a read: the last of a burst to 4 users would come 2 ms late."""
    found = health(without_stamps(cell()), {**CLIENT, **client}, CLOSED)
    assert found.ok is ok
    assert found.event_lag_s == {"p50": None, "p99": None, "max": None}


def test_without_stamps_the_detail_has_every_number() -> None:
    detail = health(without_stamps(cell()), CLIENT, CLOSED).detail
    assert "kept from a CPU for 0.0% of the time (limit 0.5%)" in detail
    assert "busy for 5% (limit 30%), and an event of every user takes it 0.12 ms (limit 1.6 ms)" in detail


def test_nothing_known_is_no_verdict() -> None:
    found = health(without_stamps(cell()), NOTHING_KNOWN, CLOSED)
    assert found.ok is None
    assert "not known on this system" in found.detail


def test_a_list_of_lags_that_is_null_is_unknown() -> None:
    found = health(cell().assign(event_lags=None), NOTHING_KNOWN, CLOSED)
    assert (found.ok, found.known) == (None, 0)


@pytest.mark.parametrize(("unknown", "ok"), [(2, True), (3, False)])
def test_the_reader_decides_as_well_as_soon_as_a_twentieth_of_the_lags_is_unknown(unknown: int, ok: bool) -> None:
    rows = cell()
    lags = [np.where(np.arange(len(own)) < unknown, np.nan, own) for own in rows["event_lags"]]
    found = health(rows.assign(event_lags=lags), {**CLIENT, "cpu_s": 9.5}, CLOSED)
    assert found.known == pytest.approx(1 - unknown / EVENTS)
    assert found.ok is ok
    assert health(rows.assign(event_lags=lags), CLIENT, CLOSED).ok is True


def test_slow_turnaround_is_seen_without_stamps() -> None:
    assert health(without_stamps(cell(turnaround_s=0.1, each=10)), NOTHING_KNOWN, CLOSED).ok is False


def test_no_request_succeeded() -> None:
    found = health(frame(failed("timeout"), failed("connect_error", index=1)), CLIENT, CLOSED)
    assert (found.ok, found.detail) == (None, "no request succeeded")


def test_failed_requests_are_left_out() -> None:
    requests = pd.concat([cell(), frame(failed("timeout", index=8, t_send=200.0))], ignore_index=True)
    assert health(requests, CLIENT, CLOSED).ok is True


def test_events_of_one_late_read_came_one_after_another() -> None:
    """The reader was away from 12 ms before event 10 until 8 ms after event 11, and its stamp is that of event 11."""
    requests = cell(lag_s=0.0, turnaround_s=0.0)
    true = np.array(requests.at[0, "event_times"])
    late, lags = true.copy(), np.zeros(len(true))
    late[10:12], lags[10:12] = true[11] + 0.008, 0.008
    requests.at[0, "event_times"], requests.at[0, "event_lags"] = late, lags
    answer = client_share(requests, CLOSED).without_client[0].answer
    assert answer and answer.times == pytest.approx(true[:EVENTS], abs=1e-6)


def test_events_that_a_server_packs_are_not_blamed_on_the_client() -> None:
    requests = cell(lag_s=0.0)
    for n in range(len(requests)):
        times, lags = np.array(requests.at[n, "event_times"]), np.zeros(EVENTS + 2)
        times[0:EVENTS:2] = times[1:EVENTS:2]
        lags[8:10] = 0.001
        requests.at[n, "event_times"], requests.at[n, "event_lags"] = times, lags
    share = client_share(requests, CLOSED)
    for before, after in zip(share.seen, share.without_client, strict=True):
        assert before.answer and after.answer
        moved = before.answer.times - after.answer.times
        assert moved - moved[0] == pytest.approx([0.001 if i in (8, 9) else 0 for i in range(EVENTS)], abs=1e-6)


def open_loop(late_s: float) -> pd.DataFrame:
    rows = [
        steady_stream(EVENTS, GAP, t_send=100 + 0.1 * n + late_s, intended_start=100 + 0.1 * n, index=n, worker=n)
        for n in range(40)
    ]
    return frame(*rows)


def test_late_sends_of_an_open_loop() -> None:
    load = Load(64, "open", 10.0, "constant")
    assert health(open_loop(0.0002), CLIENT, load).ok is True
    found = health(open_loop(0.01), CLIENT, load)
    assert found.ok is False
    assert error(found, "ttft_from_intended_mean_s") == pytest.approx(0.01)
    assert error(found, "ttft_mean_s") == pytest.approx(0, abs=1e-9)


def test_waiting_for_a_free_user_is_not_the_clients_share() -> None:
    """One user: every request waits for the one before, which is what the load point asked for."""
    rows, send = [], 100.0
    for n in range(8):
        rows.append(steady_stream(EVENTS, GAP, t_send=send, intended_start=100 + 0.1 * n, index=n))
        send = rows[-1]["t_end"]
    assert health(frame(*rows), CLIENT, Load(1, "open", 10.0, "constant")).ok is True


def test_a_statistic_that_only_one_account_has_is_infinitely_far() -> None:
    """A peak needs 3 s of wall time."""
    seen, true = (parse(frame(steady_stream(4, gap))) for gap in (1.0, 0.5))
    for found in (differences(seen, true, Load(1)), differences(true, seen, Load(1))):
        assert (found[0].name, found[0].value, found[0].used) == ("peak_throughput_tok_s", math.inf, math.inf)
        assert str(found[0]) == "whether there is a peak_throughput_tok_s"
    assert "peak_throughput_tok_s" not in {one.name for one in differences(true, true, Load(1))}


def test_what_is_recorded() -> None:
    lags = np.full(EVENTS, 1e-4)
    lags[5] = 0.003
    numbers = health(cell(lags, turnaround_s=0.002), CLIENT, CLOSED).numbers
    assert numbers["lags_known"] == 1
    assert numbers["event_lag_s"] == pytest.approx({"p50": 1e-4, "p99": 0.003, "max": 0.003}, rel=1e-6)
    assert numbers["send_late_s"] == pytest.approx({"p50": 0.0, "p99": 0.0021, "max": 0.0021}, rel=1e-6)
    assert numbers["own_error"]["ttft_mean_s"] == pytest.approx({"value": 1e-4, "limit": 0.002}, rel=1e-3)
    assert numbers["own_error"]["throughput_full_tok_s"]["limit"] == 0.01


@st.composite
def cells(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests of a few users, some of them failed, some without usage, with lags or without."""
    rows, send = [], [0.0, 0.1, 0.2]
    for index in range(draw(st.integers(1, 8))):
        user, gap = draw(st.integers(0, 2)), draw(st.sampled_from([0.0, 0.003, 0.05, 0.7]))
        n, told = draw(st.integers(1, 12)), draw(st.booleans())
        events = [(send[user] + 0.1 + i * gap, "ab " * (i % 3 + 1), 2 * i + 1 if told else None) for i in range(n)]
        lags = [draw(st.sampled_from([0.0, 1e-4, 0.02, math.nan])) for _ in range(n + 2)]
        total = draw(st.sampled_from([None, 2 * n, 2 * n + 1]))
        status = draw(st.sampled_from(["ok", "ok", "ok", "truncated"]))
        rows.append(
            row(events, index=index, t_send=send[user], tokens=total, status=status, worker=user, event_lags=lags)
        )
        send[user] = rows[-1]["t_end"] + draw(st.sampled_from([0.0, 0.001, 0.3]))
    return rows


@settings(max_examples=60, deadline=None)
@given(cells(), st.sampled_from([1, 3]))
def test_what_is_compared_is_what_is_reported(rows: list[dict[str, Any]], concurrency: int) -> None:
    load, slos = Load(concurrency), Slos(ttft_s=0.11)
    share, reported = client_share(frame(*rows), load), cell_metrics(frame(*rows), load, None, slos)
    assert cell_metrics(share.seen, load, None, slos) == reported
    assert {one.name for one in health(frame(*rows), CLIENT, load, slos).errors} >= set(statistics(reported)) - (
        set() if reported["requests_ok"] else {"goodput_req_s"}
    )
    assert [one.row["status"] for one in share.without_client] == [one["status"] for one in rows]
    for before, after in zip(share.seen, share.without_client, strict=True):
        assert (before.answer is None) is (after.answer is None)
        if before.answer and after.answer:
            assert after.answer.tokens is before.answer.tokens
            assert np.all(after.answer.times <= before.answer.times)


@settings(max_examples=30, deadline=None)
@given(cells())
def test_a_client_that_adds_nothing_has_no_error(rows: list[dict[str, Any]]) -> None:
    ideal = [own | {"event_lags": [0.0] * len(own["event_times"]), "worker": n} for n, own in enumerate(rows)]
    assert all(one.value == 0 for one in health(frame(*ideal), CLIENT, Load(3)).errors)
