"""The splitter of event streams and what single events say."""

from __future__ import annotations

import itertools
import json
import tempfile
from array import array
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import strategies as st
from laws import law
from scripted_server import event

from ddtree_bench import metrics
from ddtree_bench.load import requests_table, sse
from ddtree_bench.load.exchange import Exchange, Failure
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.plan import Load

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def data(stream: bytes) -> list[bytes]:
    return [one.data for one in sse.split([(0.0, 0.0, stream)])]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, 2**200, -1])
    | st.floats()
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def shaped(**fields: Any) -> st.SearchStrategy[Any]:
    """Objects whose fields may be right, absent or anything."""
    return JSON | st.fixed_dictionaries({}, optional={name: JSON | kind for name, kind in fields.items()})


CALL = shaped(function=shaped(name=st.text(), arguments=st.text()))
DELTA = shaped(
    content=st.text(), reasoning=st.text(), reasoning_content=st.text(), tool_calls=st.lists(CALL, max_size=2)
)
CHOICE = shaped(delta=DELTA, text=st.text(), finish_reason=shaped(type=st.sampled_from(["stop", "abort"])))
USAGE = shaped(prompt_tokens=JSON, completion_tokens=JSON, prompt_tokens_details=shaped(cached_tokens=JSON))
DETAILS = shaped(spec_verify_ct=JSON, spec_correct_drafts_histogram=st.lists(JSON, max_size=3), num_retractions=JSON)
PAYLOADS = shaped(
    choices=st.lists(CHOICE, max_size=2),
    usage=USAGE,
    sglext=shaped(spec_tokens_details=DETAILS),
    error=JSON,
    object=JSON,
)


def table(http_status: int, body: bytes) -> pd.DataFrame:
    """The table of one request that was answered by `body`."""
    head = f"HTTP/1.1 {http_status} x\r\nContent-Type: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    exchange = Exchange(0.0, 0.0, 2.0, array("d", [1.0]), array("d", [0.001]), [head.encode() + body], None)
    sent = requests_table.Sent(0, Prompt("p", 1, "code", "text"), 0, exchange)
    return requests_table.to_frame([requests_table.row(sent, 8)])


def said(payload: Any, name: str = "") -> sse.Event:
    return sse.classify(
        sse.RawEvent(1.0, name, payload if isinstance(payload, bytes) else json.dumps(payload).encode())
    )


@law(
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_a_stream_split_anywhere_gives_the_same_events(texts: list[str], end: str, cuts: list[int]) -> None:
    """Cuts fall inside lines, line ends and UTF-8 sequences alike."""
    payloads = [json.dumps({"t": text}, ensure_ascii=False) for text in texts]
    stream = "".join(f": ping{end}event: message{end}data: {p}{end}id: 7{end}{end}" for p in payloads).encode()
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    pieces = [(float(a), 0.0, stream[a:b]) for a, b in itertools.pairwise(edges)]
    events = sse.split(pieces)
    assert [json.loads(one.data)["t"] for one in events] == texts
    assert {one.name for one in events} == {"message"}


def test_single_bytes_are_pieces_too() -> None:
    stream = 'data: {"t": "naïve 🌳"}\r\n\r\ndata: [DONE]\r\n\r\n'.encode()
    events = sse.split([(float(i), 0.0, stream[i : i + 1]) for i in range(len(stream))])
    assert [one.data.decode() for one in events] == ['{"t": "naïve 🌳"}', "[DONE]"]


def test_an_event_is_stamped_when_its_data_was_complete() -> None:
    pieces = [(1.0, 0.1, b"data: a"), (2.0, 0.2, b"b\n"), (3.0, 0.3, b"\ndata: c\n\n")]
    events = sse.split(pieces)
    assert [(one.time, one.lag, one.data) for one in events] == [(2.0, 0.2, b"ab"), (3.0, 0.3, b"c")]
    assert [sse.classify(one).lag for one in events] == [0.2, 0.3]


def test_data_of_several_lines_is_joined_and_one_blank_is_taken_off() -> None:
    assert data(b"data:a\ndata:  b\ndata\n\n") == [b"a\n b\n"]


def test_comments_and_events_without_data_are_nothing() -> None:
    assert data(b"\xef\xbb\xbf: ping\n\n\nevent: x\n\nretry: 5\n\ndata: 1\n\n") == [b"1"]


def test_an_event_whose_blank_line_never_came_counts_if_its_line_was_complete() -> None:
    assert data(b"data: 1\n\ndata: [DONE]\n") == [b"1", b"[DONE]"]
    assert data(b'data: 1\n\ndata: {"half') == [b"1"]


@pytest.mark.parametrize(
    ("payload", "kind", "text"),
    [
        ({"choices": [{"delta": {"content": "a"}}]}, "token", "a"),
        ({"choices": [{"delta": {"reasoning_content": "r"}}]}, "token", "r"),
        ({"choices": [{"delta": {"reasoning": "r"}}]}, "token", "r"),
        ({"choices": [{"delta": {"reasoning": "r", "reasoning_content": "r"}}]}, "token", "r"),
        ({"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}, "token", "f{}"),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, "token", ""),
        ({"choices": [{"text": "t", "finish_reason": None}]}, "token", "t"),
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}, "token", "a"),
        ({"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 3}}, "token", "a"),
        ({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}, "finish", ""),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, "finish", ""),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, "role", ""),
        ({"choices": [], "usage": {"completion_tokens": 3}}, "usage", ""),
        ({"choices": [{"delta": {"content": None}}], "usage": None}, "other", ""),
        ({"choices": [{"delta": None}]}, "other", ""),
        ({"choices": []}, "other", ""),
        (b"[DONE]", "done", ""),
        (b"[1, 2]", "other", ""),
        (b"no json", "other", ""),
        (b'{"choices": ' + b"[" * 100_000, "other", ""),
        ({"choices": 5}, "other", ""),
        ({"choices": {"delta": {"content": "a"}}}, "other", ""),
        ({"choices": [{"delta": "x"}]}, "other", ""),
        ({"choices": [{"text": 5}]}, "other", ""),
        ({"choices": [{"delta": {"content": ["a"]}}]}, "other", ""),
        ({"choices": [{"delta": {"tool_calls": ["x"]}}]}, "other", ""),
        ({"choices": [{"delta": {"tool_calls": {"function": {"name": "f"}}}}]}, "other", ""),
        ({"choices": [{"delta": {"tool_calls": [{"function": "f"}]}}]}, "token", ""),
        ({"choices": [], "usage": [1]}, "other", ""),
        ({"choices": [], "sglext": [1]}, "other", ""),
        ({"choices": [], "sglext": {"spec_tokens_details": [1]}}, "other", ""),
        ({"choices": [{"delta": {"content": "\ud83d"}}]}, "token", "\ufffd"),
    ],
)
def test_the_kind_of_an_event(payload: Any, kind: str, text: str) -> None:
    event_ = said(payload)
    assert (event_.kind, event_.text, event_.time) == (kind, text, 1.0)


def test_counts_finish_reason_and_details_are_taken_from_any_event() -> None:
    spec = {"spec_verify_ct": 2}
    payload = {
        "choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 3},
        "sglext": {"spec_tokens_details": spec},
    }
    event_ = said(payload)
    assert (event_.tokens, event_.finish_reason, event_.spec) == (3, "stop", spec)


@pytest.mark.parametrize(
    ("payload", "rounds"),
    [
        ({"choices": [], "meta_info": {"id": "x", "spec_verify_ct": 3}}, 3),
        ({"choices": [{"text": "", "meta_info": {"spec_verify_ct": 4}}]}, 4),
        ({"choices": [], "meta_info": {"id": "x"}}, None),
        ({"choices": [], "meta_info": [3]}, None),
        ({"sglext": {"spec_tokens_details": {"spec_verify_ct": 5}}, "meta_info": {"spec_verify_ct": 3}}, 5),
    ],
)
def test_details_of_speculation_come_in_meta_info_as_well(payload: Any, rounds: int | None) -> None:
    spec = said(payload).spec
    assert (None if spec is None else spec["spec_verify_ct"]) == rounds


@pytest.mark.parametrize(
    ("given_", "reason"),
    [("stop", "stop"), ({"type": "abort", "message": "m"}, "abort"), ({"x": 1}, '{"x": 1}'), (7, "7"), ({}, None)],
)
def test_a_finish_reason_is_text_whatever_it_was(given_: Any, reason: str | None) -> None:
    assert said({"choices": [{"delta": {}, "finish_reason": given_}]}).finish_reason == reason


@law(payloads=st.lists(PAYLOADS, min_size=1, max_size=4), http_status=st.sampled_from([200, 200, 500]))
def test_no_payload_loses_the_table_of_the_cell(payloads: list[Any], http_status: int) -> None:
    found = table(http_status, b"".join(event(payload) for payload in payloads))
    with tempfile.TemporaryDirectory() as folder:
        requests_table.write(found, Path(folder) / "r.parquet")
        pd.testing.assert_frame_equal(requests_table.read(Path(folder) / "r.parquet"), found)
    assert found["status"].isin(requests_table.STATUSES).all()
    assert metrics.cell_metrics(found, Load(1), "DDTREE")["requests"] == len(metrics.request_metrics(found)) == 1


@law(body=JSON)
def test_no_body_that_is_no_stream_loses_the_table_of_the_cell(body: Any) -> None:
    for http_status in (200, 500):
        found = table(http_status, json.dumps(body).encode())
        assert found["status"].isin(["http_error", "truncated", "error_event"]).all()
        assert found["error"].notna().all()


@pytest.mark.parametrize("count", [None, "3", 3.0, True, -1, 2**53])
def test_a_count_that_is_no_integer_is_unknown(count: Any) -> None:
    assert said({"choices": [], "usage": {"completion_tokens": count, "x": 1}}).tokens is None


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, ""),
        ({"error": "out of memory"}, ""),
        ({"object": "error", "message": "out of memory"}, ""),
        ({"message": "out of memory"}, "error"),
    ],
)
def test_an_error_object_in_any_of_its_forms(payload: Any, name: str) -> None:
    event_ = said(payload, name)
    assert (event_.kind, event_.error) == ("error", "out of memory")


def test_an_empty_error_field_is_no_error() -> None:
    assert said({"error": None, "choices": [{"delta": {"content": "a"}}]}).kind == "token"


def test_the_event_helper_and_the_splitter_agree() -> None:
    assert data(event({"a": 1}) + event(b"[DONE]")) == [b'{"a": 1}', b"[DONE]"]


STREAM = [
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event({"choices": [{"text": "the tr"}]}),
    event({"choices": [{"text": "ee"}]}) + event({"choices": [{"text": "", "finish_reason": "length"}]}),
    event({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}}) + event(b"[DONE]"),
]


class Words:
    """A tokenizer of words: a word belongs to the part of its last letter."""

    def counts(self, texts: list[str]) -> list[int]:
        ends = list(itertools.accumulate(len(text) for text in texts))
        whole = "".join(texts)
        counts = [0] * len(texts)
        for at, letter in enumerate(whole):
            if letter != " " and whole[at + 1 : at + 2] in ("", " "):
                counts[next(i for i, end in enumerate(ends) if at < end)] += 1
        return counts


def sent(pieces: list[bytes], failure: Failure | None = None, **fields: Any) -> requests_table.Sent:
    times = array("d", [1.0 + i for i in range(len(pieces))])
    lags = array("d", [0.001 * (i + 1) for i in range(len(pieces))])
    exchange = Exchange(0.5, 0.501, 9.0, times, lags, pieces, failure, **fields)
    return requests_table.Sent(3, Prompt("p", 1, "code", "text"), 2, exchange, 0.25)


def test_a_row_says_when_it_was_sent_and_read_and_what_came() -> None:
    found = requests_table.to_frame([requests_table.row(sent(STREAM, connect_s=0.02, retries=1), 8, Words())]).iloc[0]
    names = ["index", "worker", "intended_start", "t_send", "t_sent", "t_end", "connect_s", "retries", "status"]
    assert found[names].tolist() == [3, 2, 0.25, 0.5, 0.501, 9.0, 0.02, 1, "ok"]
    assert found["event_times"].tolist() == [1, 2, 2, 3, 3]
    assert found["event_lags"].tolist() == pytest.approx([0.001, 0.002, 0.002, 0.003, 0.003])
    assert found["event_kinds"].tolist() == ["token", "token", "finish", "usage", "done"]
    assert found["event_tokenized"].tolist() == [1, 1, 0, 0, 0]
    assert (found["completion_tokens"], found["prompt_tokens"], found["text"]) == (2, 5, "the tree")


def test_a_row_without_a_tokenizer_has_no_tokens_of_it() -> None:
    found = requests_table.to_frame([requests_table.row(sent(STREAM), 8)]).iloc[0]
    assert found["event_tokenized"] is None
    assert found["retries"] == 0
    assert pd.isna(found["connect_s"])


@pytest.mark.parametrize(
    ("pieces", "failure", "status", "words"),
    [
        (STREAM, Failure("truncated", "reset"), "ok", ""),
        (STREAM[:1], None, "truncated", "without finish_reason"),
        (STREAM[:1], Failure("timeout", "silent for 9 s"), "timeout", "silent for 9 s"),
        ([], Failure("connect_error", "refused"), "connect_error", "refused"),
        ([], None, "connect_error", "closed before an answer came"),
        ([b"220 mail ESMTP\r\n\r\n"], None, "truncated", "framing is broken"),
        ([b"HTTP/1.1 503 x\r\nContent-Length: 4\r\n\r\nbusy"], None, "http_error", "HTTP 503: busy"),
        ([STREAM[0], event({"error": {"message": "out of memory"}})], None, "error_event", "out of memory"),
        ([b"HTTP/1.1 200 x\r\n\r\n" + event(b"[DONE]")], None, "empty", "without a token-bearing event"),
    ],
)
def test_the_status_of_a_request(pieces: list[bytes], failure: Failure | None, status: str, words: str) -> None:
    row = requests_table.row(sent(pieces, failure), 8)
    assert row["status"] == status
    assert words in (row["error"] or "")


def test_rows_become_a_frame_in_batches_that_are_one_table() -> None:
    made = (
        requests_table.row(sent(STREAM if i % 3 else STREAM[:1]), 8, Words() if i % 2 else None) for i in range(600)
    )
    found = requests_table.to_frame(made)
    assert found["status"].tolist() == ["ok" if i % 3 else "truncated" for i in range(600)]
    assert found["event_tokenized"].isna().tolist() == [i % 2 == 0 for i in range(600)]
    assert {kind for kinds in found["event_kinds"] for kind in kinds} == {"token", "finish", "usage", "done"}
