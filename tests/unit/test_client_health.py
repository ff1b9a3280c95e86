"""What the client says about itself, on rows whose moments and lags are chosen by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from raw_rows import failed, frame, steady_stream

from ddtree_bench.metrics.client_health import Health, health
from ddtree_bench.metrics.client_share import client_share
from ddtree_bench.plan import Load

GAP, FIRST, EVENTS = 0.02, 0.1, 40
E2E = FIRST + (EVENTS - 1) * GAP
CLIENT = {"wall_s": 10.0, "reader_wait_s": 0.01, "reader_slices": 1000}
CLOSED = Load(4)


def cell(lag_s: float | np.ndarray = 1e-4, turnaround_s: float = 1e-4, each: int = 2, **fields: Any) -> pd.DataFrame:
    """Four users, 5 ms apart, with `each` requests of E2E s one after another; every event is read `lag_s` late."""
    lags = np.broadcast_to(np.asarray(lag_s, dtype=float), EVENTS)
    rows = []
    for user in range(4):
        send = 100.0 + 0.005 * user
        for _ in range(each):
            row = steady_stream(EVENTS, GAP, t_send=send, index=len(rows), worker=user, **fields)
            event_lags = np.append(lags, [lags[-1]] * 2)
            moments = row["event_times"] + event_lags
            row |= {"event_times": moments, "event_lags": event_lags, "t_end": moments[-1]}
            rows.append(row)
            send = row["t_end"] + turnaround_s
    return frame(*rows)


def error(found: Health, name: str) -> float:
    return next(one.value for one in found.errors if one.name == name)


def test_quiet_client_is_healthy() -> None:
    found = health(cell(), CLIENT, CLOSED)
    assert found.ok is True
    assert error(found, "TTFT mean") == pytest.approx(1e-4, rel=1e-3)
    assert error(found, "ITL mean") == pytest.approx(0, abs=1e-9)
    assert found.detail.endswith("by the kernel's receive stamps of 100% of the events")


def test_late_first_events_fail_the_ttft() -> None:
    lags = np.full(EVENTS, 1e-4)
    lags[0] = 0.005
    found = health(cell(lags), CLIENT, CLOSED)
    assert found.ok is False
    assert found.errors[0].name == "TTFT mean"
    assert found.errors[0].value == pytest.approx(0.005, rel=1e-3)
    assert "5.00 ms of TTFT mean (limit 2 ms)" in found.detail


def test_late_first_events_of_few_requests_fail_only_what_they_move() -> None:
    requests = cell(each=10)
    for row in range(3):  # of 40: more than a tenth of them would be needed to move p90
        requests.at[row, "event_lags"] = np.concatenate([[0.03], requests.at[row, "event_lags"][1:]])
        requests.at[row, "event_times"] = requests.at[row, "event_times"] + np.array([0.0299, *[0] * (EVENTS + 1)])
    found = health(requests, CLIENT, CLOSED)
    assert error(found, "TTFT mean") == pytest.approx(1e-4 + 3 * 0.0299 / 40, rel=1e-3)
    assert error(found, "TTFT p90") == pytest.approx(1e-4, rel=1e-3)
    assert found.ok is False


def test_slow_turnaround_fails_the_throughput() -> None:
    each, turnaround = 10, 0.05 * E2E
    found = health(cell(turnaround_s=turnaround, each=each), CLIENT, CLOSED)
    assert found.ok is False
    assert found.errors[0].is_rate
    share = (each - 1) * turnaround / (each * E2E + 0.015)
    assert error(found, "throughput") == pytest.approx(1 - 1 / (1 + share), rel=0.05)
    assert "throughput (limit 1%)" in found.detail
    assert error(found, "TTFT mean") < 2e-4


def test_time_to_send_counts_unless_the_prompt_is_long() -> None:
    slow = cell(turnaround_s=0.0).assign(t_sent=lambda rows: rows["t_send"] + 0.004)
    assert error(health(slow, CLIENT, CLOSED), "TTFT mean") == pytest.approx(0.0041, rel=1e-3)
    long = slow.assign(prompt_tokens=pd.array([50_000] * len(slow), dtype="Int64"))
    assert health(long, CLIENT, CLOSED).ok is True


def test_connecting_anew_and_retries_are_not_the_clients_share() -> None:
    anew = cell(turnaround_s=0.2, each=10)
    assert health(anew, CLIENT, CLOSED).ok is False
    assert health(anew.assign(connect_s=0.2), CLIENT, CLOSED).ok is True
    assert health(anew.assign(retries=pd.array([1] * len(anew), dtype="Int64")), CLIENT, CLOSED).ok is True


def test_turnaround_of_the_whole_chain_is_taken_out() -> None:
    share = client_share(cell(lag_s=0.001, turnaround_s=0.1, each=3), CLOSED)
    starts = share.without_client.send.reshape(4, 3) - share.without_client.send.min()
    assert starts[0] == pytest.approx([0, E2E + 0.0005, 2 * (E2E + 0.0005)], abs=1e-6)
    assert starts[3] - starts[0] == pytest.approx([0.015] * 3, abs=1e-6)


def without_stamps(requests: pd.DataFrame) -> pd.DataFrame:
    return requests.assign(event_lags=[np.full(len(lags), np.nan, np.float32) for lags in requests["event_lags"]])


@pytest.mark.parametrize(("waited", "ok"), [(0.01, True), (0.05, True), (0.07, False)])
def test_without_stamps_the_wait_for_a_cpu_decides(waited: float, ok: bool) -> None:
    found = health(without_stamps(cell()), {**CLIENT, "reader_wait_s": waited}, CLOSED)
    assert found.ok is ok
    assert "kept the reading thread from a CPU" in found.detail


def test_nothing_known_is_no_verdict() -> None:
    nothing = {"wall_s": 10.0, "reader_wait_s": None, "reader_slices": None}
    found = health(without_stamps(cell()), nothing, CLOSED)
    assert found.ok is None
    assert "not known on this system" in found.detail


def test_slow_turnaround_is_seen_without_stamps() -> None:
    nothing = {"wall_s": 10.0, "reader_wait_s": None, "reader_slices": None}
    assert health(without_stamps(cell(turnaround_s=0.1, each=10)), nothing, CLOSED).ok is False


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
    share = client_share(requests, CLOSED)
    assert share.without_client.times[:EVENTS] == pytest.approx(true[:EVENTS], abs=1e-6)


def test_events_that_a_server_packs_are_not_blamed_on_the_client() -> None:
    requests = cell(lag_s=0.0)
    for row in range(len(requests)):
        times, lags = np.array(requests.at[row, "event_times"]), np.zeros(EVENTS + 2)
        times[0:EVENTS:2] = times[1:EVENTS:2]
        lags[8:10] = 0.001
        requests.at[row, "event_times"], requests.at[row, "event_lags"] = times, lags
    share = client_share(requests, CLOSED)
    assert share.lags[8:10] == pytest.approx([0.001, 0.001])
    assert share.lags.sum() == pytest.approx(0.002 * len(requests))


def test_lags_that_are_not_known_are_those_of_the_nearest_event() -> None:
    lags = np.full(EVENTS, np.nan)
    lags[::8] = 0.001
    lags[16] = 0.003
    requests = cell(lag_s=0.0)
    requests = requests.assign(event_lags=[np.concatenate([lags, [np.nan] * 2])] * len(requests))
    share = client_share(requests, CLOSED)
    assert share.known == pytest.approx(1 / 8)
    assert share.lags[:EVENTS][[0, 3, 15, 16, 17, 24]] == pytest.approx([0.001, 0.001, 0.003, 0.003, 0.003, 0.001])


@pytest.mark.parametrize(("every", "ok"), [(1, True), (8, False)])
def test_a_sample_of_lags_must_be_further_from_the_limit(every: int, ok: bool) -> None:
    requests = cell(lag_s=0.0012)
    for row in range(len(requests)):
        lags = np.array(requests.at[row, "event_lags"])
        lags[np.arange(len(lags)) % every != 0] = np.nan
        requests.at[row, "event_lags"] = lags
    found = health(requests, CLIENT, CLOSED)
    assert found.errors[0].used == pytest.approx(0.6, rel=1e-3)
    assert found.ok is ok


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
    assert error(found, "TTFT from the intended start mean") == pytest.approx(0.01)
    assert error(found, "TTFT mean") == pytest.approx(0, abs=1e-9)


def test_waiting_for_a_free_user_is_not_the_clients_share() -> None:
    """One user: every request waits for the one before, which is what the load point asked for."""
    rows, send = [], 100.0
    for n in range(8):
        rows.append(steady_stream(EVENTS, GAP, t_send=send, intended_start=100 + 0.1 * n, index=n))
        send = rows[-1]["t_end"]
    assert health(frame(*rows), CLIENT, Load(1, "open", 10.0, "constant")).ok is True
