"""The load client against a server that misbehaves in every way that was seen; numbers are those of the fault list."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from load_cases import SHORT, WORK, ask, closed_port, prompts
from scripted_server import (
    DONE,
    Script,
    ScriptedServer,
    chunk,
    event,
    stream,
    usage,
    usage_event,
    words,
)

from ddtree_bench import metrics
from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.load.bodies import request_body
from ddtree_bench.load.cell import Measurement, measure
from ddtree_bench.load.exchange import Limits
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.load.warmup import shapes, warm_up
from ddtree_bench.load.wire import AnswerEnd
from ddtree_bench.metrics import definitions
from ddtree_bench.plan import Load
from ddtree_bench.servers import api


def test_a_regular_answer_in_full() -> None:
    spec = {"spec_verify_ct": 2, "spec_correct_drafts_histogram": [1, 1]}
    row = ask(
        stream(
            chunk(role="assistant", content="", usage=usage(0)),
            chunk(content="The ", usage=usage(1)),
            chunk(content="answer is ", usage=usage(3)),
            chunk(content="42", finish="stop", usage=usage(4)),
            usage_event(4, spec=spec, cached=2),
            DONE,
        )
    )
    assert (row["status"], row["text"], row["finish_reason"]) == ("ok", "The answer is 42", "stop")
    assert pd.isna(row["error"])
    assert list(row["event_kinds"]) == ["role", "token", "token", "token", "usage", "done"]
    assert list(row["event_tokens"][:5]) == [0, 1, 3, 4, 4]
    assert pd.isna(row["event_tokens"][5])
    assert list(row["event_finish"]) == [False, False, False, True, False, False]
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_prompt_tokens"]) == (5, 4, 2)
    assert json.loads(row["spec"]) == spec
    assert row["t_send"] <= min(row["event_times"])
    assert max(row["event_times"]) <= row["t_end"]
    assert list(row["event_times"]) == sorted(row["event_times"])


def test_fault_02_usage_null_on_ordinary_events_and_only_at_the_end() -> None:
    row = ask(
        stream(
            chunk(content="a ", usage=None),
            chunk(content="b ", usage=None),
            chunk(content="", finish="stop", usage=None),
            usage_event(3),
            DONE,
        )
    )
    assert (row["status"], row["completion_tokens"]) == ("ok", 3)
    assert all(pd.isna(n) for n in row["event_tokens"][:3])


def test_fault_02_usage_missing_altogether_is_unknown_and_not_a_guess() -> None:
    row = ask(stream(chunk(content="a "), chunk(content="b ", finish="length"), DONE))
    assert row["status"] == "ok"
    assert pd.isna(row["completion_tokens"])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_fault_03_all_text_in_the_reasoning(field: str) -> None:
    row = ask(
        stream(
            chunk(**{field: "hmm "}, usage=usage(1)),
            chunk(**{field: "so"}, usage=usage(2)),
            chunk(finish="stop"),
            usage_event(3),
            DONE,
        )
    )
    assert (row["status"], row["text"]) == ("ok", "hmm so")
    assert list(row["event_kinds"]).index("token") == 0


def test_fault_04_an_error_object_after_some_tokens() -> None:
    row = ask(stream(chunk(content="a ", usage=usage(1)), event({"error": {"message": "out of memory"}}), DONE))
    assert (row["status"], row["error"], row["completion_tokens"]) == ("error_event", "out of memory", 1)


@pytest.mark.parametrize("reason", ["abort", "error", {"type": "abort", "message": "too long"}])
def test_fault_04_an_answer_that_the_server_broke_off_is_no_success(reason: Any) -> None:
    word = "abort" if isinstance(reason, dict) else reason
    row = ask(stream(chunk(content="a ", usage=usage(1)), chunk(finish=reason), usage_event(1), DONE))
    assert (row["status"], row["finish_reason"], row["text"]) == ("error_event", word, "a ")
    assert row["error"] == f"the server ended the answer with finish_reason {word!r}"


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("end", ["cut", "reset"])
def test_fault_04_a_stream_cut_after_3_of_24_tokens(chunked: bool, end: Any) -> None:
    three = [(0.0 if i else 0.05, chunk(content=f"w{i} ", usage=usage(i + 1))) for i in range(3)]
    # The pause lets the client read what was sent: a reset throws away what it has not.
    row = ask(Script([*three, (0.2, chunk(content="w3 ")[:9])], chunked=chunked, end=end))
    assert (row["status"], row["text"], row["completion_tokens"]) == ("truncated", "w0 w1 w2 ", 3)
    assert row["error"]


def test_a_cut_after_the_answer_had_ended_takes_nothing_from_it() -> None:
    row = ask(stream(chunk(content="a"), chunk(finish="stop"), end="cut"))
    assert (row["status"], row["finish_reason"]) == ("ok", "stop")


def test_fault_07_a_stream_that_is_not_chunked_keeps_its_gaps() -> None:
    """A line iterator with a buffer would give these three events one stamp."""
    row = ask(
        Script(
            [
                (0.0, chunk(content="a")),
                (0.15, chunk(content="b")),
                (0.15, chunk(content="c", finish="stop") + DONE),
            ],
            chunked=False,
        )
    )
    gaps = [b - a for a, b in zip(row["event_times"], row["event_times"][1:3], strict=False)]
    assert row["status"] == "ok"
    assert len(gaps) == 2
    assert min(gaps) > 0.05


def test_an_http_error_carries_the_servers_message() -> None:
    body = json.dumps({"error": {"message": "no such model", "code": 404}}).encode()
    row = ask(Script([(0, body)], status=404, content_type="application/json"))
    assert (row["status"], row["http_status"], row["error"]) == ("http_error", 404, "HTTP 404: no such model")
    assert len(row["event_times"]) == 0


def test_an_http_error_without_json() -> None:
    row = ask(Script([(0, b"<h1>broken</h1>")], status=500, content_type="text/html"))
    assert (row["status"], row["error"]) == ("http_error", "HTTP 500: <h1>broken</h1>")


def test_an_answer_that_is_no_stream() -> None:
    plain = ask(Script([(0, b'{"choices": []}')], content_type="application/json"))
    error = ask(Script([(0, b'{"error": "busy"}')], content_type="application/json"))
    assert plain["status"] == "truncated"
    assert "application/json" in plain["error"]
    assert (error["status"], error["error"]) == ("error_event", "busy")


def test_an_answer_without_text_is_empty() -> None:
    row = ask(stream(chunk(role="assistant"), chunk(finish="stop"), usage_event(1), DONE))
    assert row["status"] == "empty"


def test_silence_is_a_timeout_and_what_came_before_is_kept() -> None:
    row = ask(stream(chunk(content="a ", usage=usage(1)), end="silence"))
    assert (row["status"], row["text"], row["completion_tokens"]) == ("timeout", "a ", 1)


def test_a_server_that_drips_for_ever_meets_the_total_limit() -> None:
    drip = Script([(0.05, chunk(content=f"{i} ")) for i in range(400)])
    row = ask(drip, limits=Limits(connect_s=5.0, idle_s=5.0, request_s=0.3))
    assert row["status"] == "timeout"
    assert 0 < len(row["event_times"]) < 400


def test_a_refused_connection() -> None:
    found = measure(f"http://127.0.0.1:{closed_port()}", WORK, prompts(2), Load(1), "m", limits=SHORT)
    assert list(found.requests["status"]) == ["connect_error"] * 2
    assert found.requests["http_status"].isna().all()
    assert found.client["connections_preopened"] == 0


def test_a_connection_closed_before_any_answer() -> None:
    row = ask(Script([], head=False, end="cut"))
    assert row["status"] == "connect_error"
    assert pd.isna(row["http_status"])


def test_no_answer_at_all_is_a_timeout() -> None:
    assert ask(Script([], head=False, end="silence"))["status"] == "timeout"


def test_fault_18_sampling_is_always_sent_in_full() -> None:
    body = request_body(replace(WORK, temperature=0.7, top_p=0.9, top_k=40), Prompt("p", 1, "code", "hello"), "m")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 24,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "seed": 7,
        "ignore_eos": False,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
    }


def test_the_completions_endpoint_takes_a_prompt() -> None:
    answer = stream(event({"choices": [{"text": "hi", "finish_reason": "stop"}]}), DONE)
    with ScriptedServer(lambda _: answer) as server:
        row = measure(server.base_url, replace(WORK, endpoint="completions"), prompts(1), Load(1), "m").requests.iloc[0]
    assert (server.paths, server.requests[0]["prompt"]) == (["/v1/completions"], "prompt 0")
    assert (row["status"], row["text"]) == ("ok", "hi")


@pytest.fixture
def loaded() -> Iterator[tuple[Measurement, ScriptedServer]]:
    with ScriptedServer(lambda _: Script([(0.02, piece) for _, piece in words(4).pieces])) as server:
        yield measure(server.base_url, WORK, prompts(12), Load(3), "m"), server


def test_the_closed_loop_sends_each_prompt_once_in_order(loaded: tuple[Measurement, ScriptedServer]) -> None:
    found, server = loaded
    rows = found.requests
    assert list(rows["index"]) == list(range(12))
    assert list(rows["prompt_id"]) == [f"p{i}" for i in range(12)]
    assert list(rows["status"]) == ["ok"] * 12
    assert sorted(body["messages"][0]["content"] for body in server.requests) == sorted(p.text for p in prompts(12))
    for worker in range(3):
        mine = rows[rows["worker"] == worker]
        assert list(mine["t_send"]) == sorted(mine["t_send"])
        assert (mine["t_send"].to_numpy()[1:] >= mine["t_end"].to_numpy()[:-1]).all()


def test_the_closed_loop_keeps_the_load_on_one_connection_a_slot(loaded: tuple[Measurement, ScriptedServer]) -> None:
    found, server = loaded
    assert server.most_in_flight == 3
    assert server.connections == 3
    assert found.client["connections_preopened"] == 3
    assert metrics.cell_metrics(found.requests, Load(3), "AR")["most_in_flight"] == 3


def test_the_client_tells_how_it_fared(loaded: tuple[Measurement, ScriptedServer]) -> None:
    client = loaded[0].client
    assert client["wall_s"] >= loaded[0].requests["t_end"].max() - loaded[0].requests["t_send"].min()
    assert client["events_read"] >= 12 * 6
    assert 0 < client["reader_cpu_s"] <= client["cpu_s"]
    assert 0 <= client["reader_wait_s"] <= client["run_queue_wait_s"]
    assert client["reader_slices"] > 0
    assert client["clock_stepped"] is False


def test_the_kernel_tells_how_long_bytes_lay_unread(loaded: tuple[Measurement, ScriptedServer]) -> None:
    """The first reads of every answer have a stamp, none from the future, and most were read at once."""
    firsts = np.concatenate([lags[:3] for lags in loaded[0].requests["event_lags"]])
    assert loaded[0].client["kernel_stamps"] is True
    assert not np.isnan(firsts).any()
    assert firsts.min() > -1e-4
    assert np.median(firsts) < 5e-3


def test_a_reader_that_is_late_is_seen_by_the_kernels_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is kept busy for 0.1 s by the head of the answer; the first event comes 0.05 s after it."""
    reached = AnswerEnd.reached

    def slowly(end: AnswerEnd, reads: Any) -> bool:
        time.sleep(0.1 if len(reads) == 1 else 0)
        return reached(end, reads)

    monkeypatch.setattr(AnswerEnd, "reached", slowly)
    row = ask(Script([(0.05, chunk(content="a", finish="stop")), (0.2, DONE)]))
    assert 0.03 < row["event_lags"][0] < 0.09
    assert row["event_lags"][1] < 0.03


def test_what_is_written_is_what_is_read(loaded: tuple[Measurement, ScriptedServer], tmp_path: Any) -> None:
    requests_table.write(loaded[0].requests, tmp_path / "requests.parquet")
    back = requests_table.read(tmp_path / "requests.parquet")
    pd.testing.assert_frame_equal(back, loaded[0].requests)
    pd.read_parquet(tmp_path / "requests.parquet").drop(columns="spec").to_parquet(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="spec"):
        requests_table.read(tmp_path / "other.parquet")


def test_fault_11_the_server_itself_tells_how_many_run_and_how_many_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four in flight at a server that admits two: the client's own stamps show four."""
    monkeypatch.setattr(server_samples, "EVERY_S", 0.02)
    slow = Script([(0.05, piece) for _, piece in words(4).pieces])
    with ScriptedServer(lambda _: slow, admits=2) as server:
        told = lambda: api.server_info(server.base_url)["counters"]  # noqa: E731
        found = measure(server.base_url, WORK, prompts(8), Load(4), "m", sample=told)
    samples = found.server_samples
    assert list(samples) == list(server_samples.COLUMNS)
    assert samples["time"].is_monotonic_increasing
    assert found.requests["t_send"].min() < samples["time"].min()
    assert metrics.cell_metrics(found.requests, Load(4), "AR")["most_in_flight"] == 4
    load = metrics.server_load(samples)
    assert list(load) == list(definitions.SERVER_LOAD)
    assert load["server_running_max"] == 2
    assert 0 < load["server_running_mean"] <= 2
    assert 0 < load["server_queued_mean"] <= 2
    assert found.client["server_sample_errors"] == 0


def test_samples_that_fail_cost_nothing_but_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_samples, "EVERY_S", 0.02)
    answers: list[dict[str, Any]] = [{"running_requests": 1, "queued_requests": 0}, {}, {"running_requests": "x"}]

    def sample() -> dict[str, float]:
        return answers.pop(0)  # IndexError at last

    with ScriptedServer(lambda _: Script([(0.05, piece) for _, piece in words(4).pieces])) as server:
        found = measure(server.base_url, WORK, prompts(4), Load(2), "m", sample=sample)
    assert list(found.requests["status"]) == ["ok"] * 4
    assert found.client["server_sample_errors"] >= 2
    assert found.server_samples["running"].fillna(-1).tolist() == [1, -1]
    assert metrics.server_load(found.server_samples) == {
        "server_running_mean": 1,
        "server_running_max": 1,
        "server_queued_mean": 0,
    }


def test_without_samples_the_servers_load_is_unknown(loaded: tuple[Measurement, ScriptedServer]) -> None:
    found, _ = loaded
    assert found.client["server_sample_errors"] is None
    assert set(metrics.server_load(found.server_samples).values()) == {None}


def test_fewer_prompts_than_slots() -> None:
    with ScriptedServer(lambda _: words(2)) as server:
        rows = measure(server.base_url, WORK, prompts(2), Load(8), "m").requests
    assert list(rows["status"]) == ["ok", "ok"]
    with pytest.raises(ValueError, match="concurrency: 0"):
        measure(server.base_url, WORK, prompts(2), Load(0), "m")


@pytest.mark.parametrize("script", [Script([], head=False, end="silence"), stream(chunk(content="a"), end="silence")])
def test_abort_cuts_the_requests_in_flight_and_sends_no_more(script: Script) -> None:
    with ScriptedServer(lambda _: script) as server:

        def dead() -> str | None:
            return "server died" if len(server.requests) == 2 else None

        found = measure(server.base_url, WORK, prompts(8), Load(2), "m", abort=dead, limits=Limits(idle_s=600))
    assert found.aborted == "server died"
    assert len(found.requests) == 2
    assert list(found.requests["status"]) == ["truncated"] * 2
    assert list(found.requests["error"]) == ["interrupted: server died"] * 2


def test_a_fault_of_the_client_itself_is_raised_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("ddtree_bench.load.connection.Connection.ask", broken)
    with ScriptedServer(lambda _: words(2)) as server, pytest.raises(ZeroDivisionError):
        measure(server.base_url, WORK, prompts(8), Load(2), "m")


def test_fault_21_all_requests_failed() -> None:
    with ScriptedServer(lambda _: Script([(0, b"{}")], status=500)) as server:
        rows = measure(server.base_url, WORK, prompts(4), Load(2), "m").requests
    cell = metrics.cell_metrics(rows, Load(2), "DDTREE")
    assert (cell["requests"], cell["requests_ok"], cell["requests_http_error"]) == (4, 0, 4)
    assert cell["throughput_full_tok_s"] is None
    assert cell["output_tokens_all_requests"] == 0
    assert metrics.request_metrics(rows)["ttft_s"].isna().all()
    assert metrics.acceptance_by_depth(rows).empty


def test_fault_17_the_warm_up_has_the_shapes_of_the_cells() -> None:
    """Every concurrency and length class once, no text twice, none of it measured."""
    long = Prompt("long", 1, "code", "word " * 300)
    cells = [(WORK, 1, prompts(4)), (WORK, 4, (*prompts(15), long)), (replace(WORK, name="twin"), 1, prompts(4))]
    warm = (Prompt("w1", 1, "code", "warm this up"), Prompt("w2", 1, "code", "and that"))
    assert [(s.concurrency, s.prompt_chars) for s in shapes(cells, 8)] == [(1, 64), (4, 64), (4, 2048)]
    with ScriptedServer(lambda _: Script([(0.05, piece) for _, piece in words(2).pieces])) as server:
        outcome = warm_up(server.base_url, "m", cells, warm, requests=2, max_tokens=8)
    sent = [body["messages"][0]["content"] for body in server.requests]
    assert [entry["ok"] for entry in outcome["shapes"]] == [2, 4, 4]
    assert len(set(sent)) == len(sent) == 10
    assert not {text[:20] for text in sent} & {p.text[:20] for p in (*prompts(15), long)}
    assert [sum(1024 < len(text) <= 2048 for text in sent), sum(len(text) <= 64 for text in sent)] == [4, 6]
    assert {body["max_tokens"] for body in server.requests} == {8}
    assert server.most_in_flight == 4
    assert json.loads(json.dumps(outcome)) == outcome
    assert all(0 < a <= b for s in outcome["shapes"] for a, b in zip(s["first_event_s"], s["latency_s"], strict=True))


def test_a_warm_up_against_a_dead_server_says_so() -> None:
    outcome = warm_up(f"http://127.0.0.1:{closed_port()}", "m", [(WORK, 1, prompts(1))], prompts(1), limits=SHORT)
    assert outcome["shapes"][0]["ok"] == 0
    assert outcome["shapes"][0]["first_event_s"] == [None, None]
    assert "refused" in outcome["shapes"][0]["errors"][0]
