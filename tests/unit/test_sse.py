"""The splitter of event streams and what single events say."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import event

from ddtree_bench import metrics
from ddtree_bench.load import requests_table, sse
from ddtree_bench.load.client import Exchange
from ddtree_bench.load.prompts import Prompt

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def data(stream: bytes) -> list[bytes]:
    return [one.data for one in sse.split([(0.0, stream)])]


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
    exchange = Exchange(0.0, 2.0, [(1.0, body)], http_status, "text/event-stream", None)
    sent = requests_table.Sent(0, Prompt("p", 1, "code", "text"), 0, exchange)
    return requests_table.to_frame([requests_table.row(sent, 8)])


def said(payload: Any, name: str = "") -> sse.Event:
    return sse.classify(
        sse.RawEvent(1.0, name, payload if isinstance(payload, bytes) else json.dumps(payload).encode())
    )


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_a_stream_split_anywhere_gives_the_same_events(texts: list[str], end: str, cuts: list[int]) -> None:
    """Cuts fall inside lines, line ends and UTF-8 sequences alike."""
    payloads = [json.dumps({"t": text}, ensure_ascii=False) for text in texts]
    stream = "".join(f": ping{end}event: message{end}data: {p}{end}id: 7{end}{end}" for p in payloads).encode()
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    pieces = [(float(a), stream[a:b]) for a, b in itertools.pairwise(edges)]
    events = sse.split(pieces)
    assert [json.loads(one.data)["t"] for one in events] == texts
    assert {one.name for one in events} == {"message"}


def test_single_bytes_are_pieces_too() -> None:
    stream = 'data: {"t": "naïve 🌳"}\r\n\r\ndata: [DONE]\r\n\r\n'.encode()
    events = sse.split([(float(i), stream[i : i + 1]) for i in range(len(stream))])
    assert [one.data.decode() for one in events] == ['{"t": "naïve 🌳"}', "[DONE]"]


def test_an_event_is_stamped_when_its_data_was_complete() -> None:
    pieces = [(1.0, b"data: a"), (2.0, b"b\n"), (3.0, b"\ndata: c\n\n")]
    assert [(one.time, one.data) for one in sse.split(pieces)] == [(2.0, b"ab"), (3.0, b"c")]


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
    ("given_", "reason"),
    [("stop", "stop"), ({"type": "abort", "message": "m"}, "abort"), ({"x": 1}, '{"x": 1}'), (7, "7"), ({}, None)],
)
def test_a_finish_reason_is_text_whatever_it_was(given_: Any, reason: str | None) -> None:
    assert said({"choices": [{"delta": {}, "finish_reason": given_}]}).finish_reason == reason


@given(payloads=st.lists(PAYLOADS, min_size=1, max_size=4), http_status=st.sampled_from([200, 200, 500]))
def test_no_payload_loses_the_table_of_the_cell(payloads: list[Any], http_status: int) -> None:
    found = table(http_status, b"".join(event(payload) for payload in payloads))
    with tempfile.TemporaryDirectory() as folder:
        requests_table.write(found, Path(folder) / "r.parquet")
        pd.testing.assert_frame_equal(requests_table.read(Path(folder) / "r.parquet"), found)
    assert found["status"].isin(requests_table.STATUSES).all()
    assert metrics.cell_metrics(found, 1, "DDTREE")["requests"] == len(metrics.request_metrics(found)) == 1


@given(body=JSON)
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
