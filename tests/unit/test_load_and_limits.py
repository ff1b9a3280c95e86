"""When the load client sends, and what ends a request and a cell: loads, tries, deadlines, lost servers, TLS."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load_cases import ONE, SHORT, WORK, closed_port, held, prompts
from scripted_server import (
    Script,
    ScriptedServer,
    chunk,
    stream,
    words,
)

from ddtree_bench import metrics
from ddtree_bench.load.arrivals import intended_starts
from ddtree_bench.load.bodies import OPTIONAL, request_body
from ddtree_bench.load.cell import measure
from ddtree_bench.load.connection import Connection
from ddtree_bench.load.exchange import Failure, Limits
from ddtree_bench.load.live import Live
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.load.reader import Reader
from ddtree_bench.load.wire import request_bytes
from ddtree_bench.plan import Load


def test_users_of_a_closed_loop_start_one_after_another() -> None:
    with ScriptedServer(lambda _: Script([(0.3, piece) for piece in (words(1).pieces[-1][1],)])) as server:
        rows = measure(server.base_url, WORK, prompts(4), Load(4), "m", stagger_s=0.05).requests
    gaps = np.diff(rows.sort_values("t_send")["t_send"])
    assert gaps.min() > 0.04
    assert rows["intended_start"].isna().all()


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_an_open_loop_sends_when_it_is_time_and_not_when_the_server_is_ready(arrivals: Any) -> None:
    """Answers take 0.2 s and requests come every 0.05 s: with 8 connections none of them waits."""
    load = Load(8, kind="open", rate=20.0, arrivals=arrivals)
    slow = Script([(0.2, b"".join(piece for _, piece in words(2).pieces))])
    with ScriptedServer(lambda _: slow) as server:
        rows = measure(server.base_url, WORK, prompts(12), load, "m", seed=3).requests
    starts = rows["intended_start"].to_numpy()
    expected = intended_starts(load, 12, 3)
    assert expected is not None
    assert np.allclose(starts - starts[0], expected, atol=1e-9)
    late = rows["t_send"].to_numpy() - starts
    assert late.min() >= 0
    assert np.median(late) < 0.02
    assert server.most_in_flight > 2


def test_an_open_loop_with_too_few_connections_is_late_and_says_so() -> None:
    slow = Script([(0.2, b"".join(piece for _, piece in words(2).pieces))])
    with ScriptedServer(lambda _: slow) as server:
        load = Load(1, kind="open", rate=50.0, arrivals="constant")
        rows = measure(server.base_url, WORK, prompts(4), load, "m").requests
    late = rows["t_send"] - rows["intended_start"]
    assert late.iloc[3] > 3 * (0.2 - 0.02) - 0.01
    requests = metrics.request_metrics(rows)
    assert (requests["ttft_from_intended_s"] - requests["ttft_s"]).iloc[3] == pytest.approx(late.iloc[3])


def test_arrivals_have_the_rate_asked_for() -> None:
    assert intended_starts(Load(4), 3, 0) is None
    assert intended_starts(Load(4, "open", 4.0, "constant"), 3, 0) == [0.0, 0.25, 0.5]
    starts = intended_starts(Load(4, "open", 10.0, "poisson"), 20_001, 5)
    assert starts is not None
    intervals = np.diff(starts)
    assert intervals.mean() == pytest.approx(0.1, rel=0.03)
    assert intervals.std() == pytest.approx(0.1, rel=0.03)
    assert starts == intended_starts(Load(4, "open", 10.0, "poisson"), 20_001, 5)
    with pytest.raises(ValueError, match="rate: None"):
        intended_starts(Load(4, "open"), 3, 0)


def test_a_connection_that_is_refused_is_tried_again_as_often_as_allowed_and_counted() -> None:
    """Tries are 0.1, 0.2 and 0.4 s apart, and connections are opened before the first request is sent."""
    row = measure(
        f"http://127.0.0.1:{closed_port()}", WORK, prompts(1), ONE, "m", limits=replace(SHORT, connect_retries=2)
    ).requests.iloc[0]
    assert (row["status"], row["retries"]) == ("connect_error", 2)
    assert row["connect_s"] > 0.3


def test_a_server_that_comes_up_late_costs_tries_and_no_request() -> None:
    port, servers = closed_port(), list[ScriptedServer]()
    coming = threading.Timer(1.0, lambda: servers.append(ScriptedServer(lambda _: words(2), port=port)))
    coming.start()
    try:
        row = measure(
            f"http://127.0.0.1:{port}", WORK, prompts(1), ONE, "m", limits=replace(SHORT, connect_retries=5)
        ).requests.iloc[0]
    finally:
        coming.join()
        servers[0].__exit__()
    assert row["status"] == "ok"
    assert len(servers[0].requests) == 1


def test_a_request_is_never_sent_twice() -> None:
    with ScriptedServer(lambda _: Script([], head=False, end="cut")) as server:
        rows = measure(server.base_url, WORK, prompts(3), ONE, "m", limits=replace(SHORT, connect_retries=5)).requests
    assert len(server.requests) == 3
    assert list(rows["status"]) == ["connect_error"] * 3
    assert list(rows["retries"]) == [0] * 3


def test_a_server_that_closes_after_each_answer_costs_a_connection_and_no_request() -> None:
    with ScriptedServer(lambda _: replace(words(2), keep_alive=False)) as server:
        rows = measure(server.base_url, WORK, prompts(4), ONE, "m").requests
    assert list(rows["status"]) == ["ok"] * 4
    assert server.connections == 4
    assert rows["connect_s"].isna().tolist() == [True, False, False, False]


def test_the_deadline_of_a_cell_keeps_what_was_ok() -> None:
    """The first two answers come at once; then the server says nothing more."""
    silent = stream(chunk(content="a "), end="silence")
    with ScriptedServer(lambda body: words(2) if int(body["messages"][0]["content"][-1]) < 2 else silent) as server:
        begun = time.perf_counter()
        found = measure(server.base_url, WORK, prompts(8), Load(2), "m", limits=Limits(cell_s=1.0))
    assert time.perf_counter() - begun < 3.0
    assert list(found.requests["status"]) == ["ok", "ok", "timeout", "timeout"]
    assert (found.planned, found.aborted) == (8, "the cell's deadline of 1 s was reached")


def test_a_server_that_is_gone_ends_the_cell_early() -> None:
    asked = count(1)

    def die(_: dict[str, Any]) -> Script:
        if next(asked) == 3:
            threading.Thread(target=server.__exit__).start()
        return words(2)

    with ScriptedServer(die) as server:
        found = measure(server.base_url, WORK, prompts(2000), Load(2), "m", limits=SHORT)
    assert found.aborted == "the server takes no connections any more"
    assert 10 <= len(found.requests) < 2000
    assert (found.requests["status"] == "ok").sum() >= 2


def test_watchers_see_the_tokens_so_far() -> None:
    seen: list[Live] = []
    with ScriptedServer(lambda _: Script([(0.1, piece) for _, piece in words(8).pieces])) as server:
        measure(server.base_url, WORK, prompts(4), Load(2), "m", watch=seen.append)
    last = seen[-1]
    assert (last.planned, last.sent, last.ended, last.in_flight) == (4, 4, 4, 0)
    assert (last.tokens, last.tokens_exact) == (32, True)
    assert [one.tokens for one in seen] == sorted(one.tokens for one in seen)
    assert any(0 < one.tokens < 32 and one.in_flight == 2 for one in seen)


def test_headers_go_with_every_request() -> None:
    with ScriptedServer(lambda _: words(1)) as server:
        measure(server.base_url, WORK, prompts(2), ONE, "m", headers={"Authorization": "Bearer x"})
    assert [head["authorization"] for head in server.headers] == ["Bearer x"] * 2
    assert {head["accept-encoding"] for head in server.headers} == {"identity"}


@pytest.mark.parametrize(
    ("limits", "message"),
    [(Limits(idle_s=0), "idle_s: 0"), (Limits(cell_s=-1), "cell_s: -1"), (Limits(connect_retries=-1), "connect_ret")],
)
def test_limits_that_mean_nothing_are_refused(limits: Limits, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure("http://127.0.0.1:1", WORK, prompts(1), ONE, "m", limits=limits)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_is_checked_and_measured_without_the_kernels_stamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    slow = Script([(0.03, piece) for _, piece in words(8).pieces])
    with ScriptedServer(lambda _: slow, tls=context) as server:
        url = server.base_url.replace("http:", "https:")
        refused = measure(url, WORK, prompts(1), ONE, "m", limits=SHORT).requests.iloc[0]
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        found = measure(url, WORK, prompts(4), Load(2), "m", limits=SHORT)
    assert refused["status"] == "connect_error"
    assert "certificate" in refused["error"]
    assert list(found.requests["status"]) == ["ok"] * 4
    assert list(found.requests["text"]) == ["".join(f"w{i} " for i in range(8))] * 4
    assert np.diff(found.requests["event_times"].iloc[0]).min() > 0.01
    assert found.client["kernel_stamps"] is False
    assert np.isnan(np.concatenate(list(found.requests["event_lags"]))).all()
    assert found.requests["connect_s"].isna().all()


def test_a_server_that_is_gone_does_not_outlast_the_deadline_in_an_answer_that_is_silent() -> None:
    """The first user's answer never ends; the second meets ten refused connections and gives the rest up."""
    silent = stream(chunk(content="a "), end="silence")

    def answer(body: dict[str, Any]) -> Script:
        if body["messages"][0]["content"] == "prompt 0":
            return silent
        # The listener goes, what is connected stays.
        server._listener.close()
        return Script([], head=False, end="cut")

    with ScriptedServer(answer) as server:
        begun = time.perf_counter()
        found = measure(
            server.base_url,
            WORK,
            prompts(60),
            Load(2),
            "m",
            limits=replace(SHORT, idle_s=600, cell_s=1.5),
            stagger_s=0.1,
        )
    assert time.perf_counter() - begun < 5
    assert found.aborted == "the server takes no connections any more"
    assert held(found)[0] == "timeout"
    assert held(found).count("connect_error") == len(found.requests) - 1 < 59


def test_connections_that_are_refused_to_some_users_do_not_end_the_cell() -> None:
    """Three connections are served; what is refused to the others must not stop these."""
    with ScriptedServer(lambda _: Script([(0.02, piece) for _, piece in words(3).pieces]), most=3) as server:
        found = measure(server.base_url, WORK, prompts(60), Load(16), "m", limits=replace(SHORT, connect_retries=2))
    assert found.aborted is None
    assert held(found).count("ok") >= 8
    assert set(held(found)) == {"ok", "connect_error"}


def test_the_deadline_reaches_a_request_that_the_server_does_not_take() -> None:
    """The server accepts and reads nothing, so that 8 MB stay with the client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.perf_counter()
        found = measure(
            f"http://127.0.0.1:{listener.getsockname()[1]}",
            WORK,
            (Prompt("long", 1, "code", "x" * 8_000_000),),
            ONE,
            "m",
            limits=Limits(cell_s=0.6),
        )
    assert time.perf_counter() - begun < 3
    assert held(found) == ["timeout"]
    assert found.aborted == "the cell's deadline of 0.6 s was reached"


def test_the_deadline_reaches_a_connection_that_is_not_answered_and_nothing_is_sent_after_it() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        # The queue of connections that nobody accepts is full with two.
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        begun = time.perf_counter()
        found = measure(f"http://127.0.0.1:{address[1]}", WORK, prompts(3), ONE, "m", limits=Limits(cell_s=0.5))
        for one in waiting:
            one.close()
    assert time.perf_counter() - begun < 4
    assert found.requests.empty
    assert found.planned == 3
    assert found.aborted is not None


def test_an_answer_that_begins_while_the_reader_stops_ends_like_the_others() -> None:
    with ScriptedServer(lambda _: stream(chunk(content="a"), end="silence")) as server, Reader() as reader:
        connection = Connection(server.base_url, SHORT, reader, threading.Event())
        assert connection.open().error is None
        reader.stop(Failure("timeout", "over"))
        flight = connection.ask(
            request_bytes(server.base_url + "/v1/chat/completions", {"messages": [{"content": "x"}]}, {})
        )
        connection.close()
    assert flight is not None
    assert flight.failure == Failure("timeout", "over")
    late = reader.begin(socket.socket(), 0.0, SHORT)
    late.wait()
    assert late.failure == Failure("timeout", "over")


def test_more_connections_than_files_are_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (50, 100))
    with pytest.raises(
        ValueError, match=r"concurrency: 500 connections need \d+ open files, and the system allows 100"
    ):
        measure("http://127.0.0.1:1", WORK, prompts(500), Load(500), "m")


def test_every_field_is_either_needed_or_may_be_left_out() -> None:
    body = request_body(WORK, prompts(1)[0], "m")
    assert set(body) - set(OPTIONAL) == {"model", "messages", "max_tokens", "stream"}
    assert set(OPTIONAL) <= set(body)


def test_fields_that_a_server_refuses_can_be_left_out() -> None:
    with ScriptedServer(lambda _: words(1)) as server:
        measure(server.base_url, WORK, prompts(1), ONE, "m", omit=["top_k", "min_p"])
    assert not {"top_k", "min_p"} & server.requests[0].keys()
    assert server.requests[0]["top_p"] == 1.0
