"""The scripted server of the calibration, the errors against its stamps, and the command."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pytest
import requests
from raw_rows import failed, frame, steady_stream

from ddtree_bench.load import sse
from ddtree_bench.load.calibration.errors import compare
from ddtree_bench.load.calibration.process import RequestStamps, ServerProcess, Stamps, calibration_server
from ddtree_bench.load.calibration.schedule import Schedule
from ddtree_bench.load.calibration.trial import Trial, calibrate
from ddtree_bench.load.cell import Measurement
from ddtree_bench.measuring import calibrate_command
from ddtree_bench.metrics.client_health import health
from ddtree_bench.plan import Load

SCHEDULE = Schedule(ttft_s=0.02, interval_s=0.005, events=6, tokens_per_event=3)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with calibration_server(SCHEDULE) as running:
        yield running


def body(prompt: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True}


def digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


def ask(server: ServerProcess, prompt: str, session: requests.Session | None = None) -> requests.Response:
    return (session or requests).post(f"{server.url}/v1/chat/completions", json=body(prompt), timeout=30)


def test_an_answer_is_a_regular_stream(server: ServerProcess) -> None:
    answer = ask(server, "a stream")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert answer.text.endswith("data: [DONE]\n\n")
    role, *tokens, finish, usage = events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [one["usage"]["completion_tokens"] for one in tokens] == [3, 6, 9, 12, 15, 18]
    assert all(len(one["choices"][0]["delta"]["content"].split()) == 3 for one in tokens)
    assert finish["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], SCHEDULE.tokens)


def test_our_own_parser_agrees() -> None:
    _, _, stream = b"".join(SCHEDULE.parts()).partition(b"\r\n\r\n")
    # Of the framing only lines without a colon are left, which say nothing in an event stream.
    kinds = [sse.classify(raw).kind for raw in sse.split([(0.0, 0.0, stream)])]
    assert kinds == ["role", *["token"] * 6, "finish", "usage", "done"]


def test_an_event_is_as_large_as_those_of_servers() -> None:
    assert {len(part) for part in Schedule().parts()[1:-1]} <= set(range(220, 270))


def test_stamps_are_complete_and_ordered(server: ServerProcess) -> None:
    server.take_stamps()
    before = time.perf_counter()
    for prompt in ("one", "two"):
        ask(server, prompt)
    after = time.perf_counter()
    stamps = server.take_stamps()
    assert set(stamps.requests) == {digest("one"), digest("two")}
    for one in stamps.requests.values():
        assert len(one.sends) == SCHEDULE.events + 1
        moments = [before, one.arrived, one.read, *one.sends, after]
        assert moments == sorted(moments)
        assert np.all(one.sends[:-1] - one.arrived >= SCHEDULE.ttft_s + SCHEDULE.interval_s * np.arange(6) - 1e-9)
    assert stamps.cpu_s > 0
    assert server.take_stamps().requests == {}


def test_one_connection_carries_several_requests(server: ServerProcess) -> None:
    with requests.Session() as session:
        assert session.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["id"] == "calibration"
        assert [ask(server, prompt, session).status_code for prompt in ("a", "b")] == [200, 200]
        assert session.get(f"{server.url}/nothing", timeout=30).status_code == 404


def connect(server: ServerProcess, buffer: int | None = None) -> socket.socket:
    parts = urlsplit(server.url)
    sock = socket.socket()
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(30)
    sock.connect((parts.hostname, parts.port))
    return sock


def request_bytes(prompt: str) -> bytes:
    content = json.dumps(body(prompt)).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


def read_all(sock: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += sock.recv(65536)
    return received


def test_a_request_in_two_pieces_begins_with_the_second(server: ServerProcess) -> None:
    content = request_bytes("in pieces")
    with connect(server) as sock:
        sock.sendall(content[:-5])
        time.sleep(0.05)
        middle = time.perf_counter()
        sock.sendall(content[-5:])
        assert read_all(sock) == b"".join(SCHEDULE.parts())
    assert server.take_stamps().requests[digest("in pieces")].arrived >= middle


def test_a_client_that_goes_away_harms_nobody(server: ServerProcess) -> None:
    with connect(server) as sock:
        sock.sendall(request_bytes("gone"))
        sock.recv(1)
    assert ask(server, "after").text.endswith("data: [DONE]\n\n")


def test_a_client_that_does_not_read_gets_everything_later() -> None:
    schedule = Schedule(ttft_s=0, interval_s=0, events=20_000)
    with calibration_server(schedule) as server, connect(server, buffer=4096) as sock:
        sock.sendall(request_bytes("slow"))
        time.sleep(0.3)
        assert read_all(sock) == b"".join(schedule.parts())


def test_the_server_ends_with_its_context() -> None:
    with calibration_server(SCHEDULE) as server:
        assert Path(f"/proc/{server.pid}").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_the_server_ends_with_its_standard_input() -> None:
    argv = [sys.executable, "-m", "ddtree_bench.load.calibration.server", "--follow-stdin"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        process.stdin.close()
        assert process.wait(30) == 0


def test_schedules_that_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="events: 0; must be at least 1"):
        Schedule(events=0)
    with pytest.raises(ValueError, match="interval_s: -1"):
        Schedule(interval_s=-1)


def made_up(read_late_s: float, sent_early_s: float) -> tuple[pd.DataFrame, Stamps, Schedule]:
    """Two requests of 10 events whose client reads and sends off by known times."""
    schedule = Schedule(ttft_s=0.1, interval_s=0.02, events=10)
    rows, stamps = [], {}
    for number, arrived in enumerate((50.0, 50.5)):
        sends = arrived + 0.1 + 0.02 * np.arange(10) + 0.0003
        stamps[f"{number:064x}"] = RequestStamps(arrived, arrived, np.append(sends, sends[-1]))
        row = steady_stream(10, 0.02, t_send=arrived - sent_early_s, index=number, worker=number)
        row["event_times"] = np.append(sends, [sends[-1]] * 2) + read_late_s
        rows.append(row)
    return frame(*rows), Stamps(stamps, 0.0), schedule


def test_errors_against_made_up_stamps() -> None:
    errors = compare(*made_up(read_late_s=0.001, sent_early_s=0.0005), Load(2))
    assert (errors.requests, errors.matched, errors.events) == (2, 2, 20)
    assert errors.error("ttft_mean_s") == pytest.approx(0.0015)
    assert errors.error("e2e_p50_s") == pytest.approx(0.0015)
    assert errors.error("itl_mean_s") == pytest.approx(0, abs=1e-9)
    wall = 0.5 + 0.1 + 9 * 0.02 + 0.0003
    assert errors.error("throughput_full_tok_s") == pytest.approx(wall / (wall + 0.0015) - 1)
    assert errors.lag_s == pytest.approx({"p50": 0.001, "p99": 0.001, "max": 0.001})
    assert errors.late_s == pytest.approx({"p50": 0.0003, "p99": 0.0003, "max": 0.0003})
    name, used = errors.worst
    assert name in ("ttft_mean_s", "ttft_p50_s", "e2e_mean_s", "e2e_p50_s")
    assert used == pytest.approx(0.75)
    assert errors.error("ttft_p99_s") is None


def test_a_request_that_failed_or_lost_events_counts_as_the_worst() -> None:
    rows, stamps, schedule = made_up(0.0, 0.0)
    rows = pd.concat([rows, frame(failed("timeout", index=2, worker=2))], ignore_index=True)
    errors = compare(rows, stamps, schedule, Load(3))
    assert (errors.requests, errors.matched) == (3, 2)
    assert errors.worst == ("requests that did not match", float("inf"))
    lost = compare(rows[:2], stamps, Schedule(ttft_s=0.1, events=11), Load(2))
    assert (lost.matched, lost.seen) == (0, {})


def test_calibrate_compares_every_event(server: ServerProcess) -> None:
    trial = calibrate(server, concurrency=3, requests_per_user=2, stagger_s=0.001)
    assert (trial.errors.requests, trial.errors.matched, trial.errors.events) == (6, 6, 36)
    assert trial.errors.seen["throughput_full_tok_s"] > 0
    assert set(trial.errors.seen) == set(trial.errors.true) == {one.name for one in trial.health.errors}
    # Whatever the machine did, an event is never read before it is sent.
    assert 0 < trial.errors.lag_s["p50"] <= trial.errors.lag_s["max"]
    assert trial.cpu_us_per_event > 0


def test_a_proxy_of_the_environment_is_not_asked(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert calibrate(server, concurrency=1, requests_per_user=1, stagger_s=0.0).errors.matched == 1


def test_a_statistic_that_only_the_client_has_is_no_small_error() -> None:
    rows, stamps, schedule = made_up(0.0, 0.0)
    later = rows.assign(
        event_times=[times + 3 * n for n, times in enumerate(rows["event_times"])], t_send=rows["t_send"] + [0, 3]
    )
    errors = compare(later, stamps, schedule, Load(2))
    assert errors.worst == ("peak_throughput_tok_s", float("inf"))
    assert errors.error("peak_throughput_tok_s") == float("inf")


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    calibrate_command.add_arguments(parser)
    quick = ("--ttft-ms", "10", "--interval-ms", "2", "--events", "5")
    return parser.parse_args([*quick, *given])


def test_the_command_prints_a_row_a_concurrency_and_writes_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    status = calibrate_command.run(arguments("--concurrency", "1", "2", "--out", str(folder)))
    written = json.loads((folder / "calibration.json").read_text())
    assert [(row["concurrency"], row["matched"], row["events"]) for row in written] == [(1, 2, 10), (2, 4, 20)]
    assert status == (0 if all(row["within_limits"] for row in written) else 1)
    assert set(written[0]["statistics"]["ttft_mean_s"]) == {"seen", "true", "error", "own_estimate"}
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in err.splitlines()] == ["1 users", "2 users"]
    assert "limits: TTFT mean 1.5 ms, ITL mean 0.1 ms, throughput 1%" in out
    with pytest.raises(SystemExit):
        arguments("--concurrency", "0")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_command, "calibrate", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    assert calibrate_command.run(arguments("--out", str(tmp_path / "file"))) == 2
    assert f"error: --out {tmp_path / 'file'}: cannot be written" in capsys.readouterr().err


def test_ctrl_c_ends_the_run_and_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(server: ServerProcess, users: int, *rest: Any) -> Trial:
        if users == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return calibrate(server, users, *rest)

    monkeypatch.setattr(calibrate_command, "calibrate", interrupted)
    assert calibrate_command.run(arguments("--concurrency", "1", "2", "3", "--out", str(tmp_path))) == 1
    assert [row["concurrency"] for row in json.loads((tmp_path / "calibration.json").read_text())] == [1]
    assert "ended early: interrupted by SIGINT; 1 of 3 trials done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("late_s", "known", "said"),
    [
        (0.0, False, "1 users: within the limits, but the client cannot tell whether it is healthy: "),
        (0.0, True, None),
        (0.004, True, "1 users: the client says that it is not healthy: the client's own share is at most "),
    ],
)
def test_what_the_client_says_of_itself_is_said(late_s: float, known: bool, said: str | None) -> None:
    rows, stamps, schedule = made_up(late_s, 0.0)
    rows["event_lags"] = [np.full(len(times), late_s if known else np.nan) for times in rows["event_times"]]
    trial = Trial(
        concurrency=1,
        errors=compare(rows, stamps, schedule, Load(2)),
        health=health(rows, {}, Load(2)),
        measurement=Measurement(rows, {}, pd.DataFrame(), len(rows), None),
        server_cpu_s=0.0,
    )
    _, *lines = calibrate_command.explanation([trial])
    assert [line.startswith(said) for line in lines] == ([True] if said else [])
