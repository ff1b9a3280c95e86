"""Whatever a server sends, framed and cut anyhow: the same rows for the same stream, and a status for all else."""

from __future__ import annotations

import itertools
import tempfile
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fault_files import ENDPOINTS, FRAMINGS, Fault
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_bench import metrics
from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.load.exchange import Exchange, Failure
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.load.wire import AnswerEnd, WireError
from ddtree_bench.plan import Load

PROMPT = Prompt("p", 1, "code", "text")
OF_TIME = {"event_times", "event_lags"}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=8)
TOKENS = st.fixed_dictionaries({"text": TEXT}, optional={"tokens": st.integers(0, 4), "id": LINE, "reasoning": TEXT})
OTHER = st.one_of(
    st.builds(lambda text: {"comment": text}, LINE),
    st.builds(lambda reason: {"finish": reason, "tokens": 1}, st.sampled_from(["stop", "length", "abort"])),
    st.sampled_from([{"role": True}, {"text": "", "usage": None}, {"json": {"error": "busy"}}, {"json": [1]}]),
    st.just({"name": "error", "json": {"message": "the name alone says that this is an error"}}),
    st.builds(lambda n: {"usage_event": n, "cached": 1, "spec": {"spec_verify_ct": n}}, st.integers(0, 99)),
)
ANSWERS = st.fixed_dictionaries(
    {
        "events": st.builds(
            lambda steps, end: [*steps, *end], st.lists(TOKENS | OTHER, max_size=6), st.sampled_from([[], ["done"]])
        ),
        "line_end": st.sampled_from(["\n", "\r\n", "\r"]),
        "extension": st.sampled_from(["", ";a", ' ; name="v"']),
        "trailers": st.sampled_from(["", "A: b\r\n", "A: b\r\nC: d\r\n"]),
    }
)
CUTS = st.lists(st.integers(0, 5000), max_size=12) | st.none()
"""Places in the bytes of an answer; None stands for all of them."""


def sent_bytes(answer: Any, endpoint: str, framing: str) -> bytes:
    fault = Fault("any", "any", "any", {}, answers=[answer])
    return b"".join(packet for _, packet in fault.scripts(endpoint, framing, "pieces")[0].sends())


def cut(data: bytes, places: list[int] | None) -> list[bytes]:
    inner = range(1, len(data)) if places is None else sorted({place for place in places if 0 < place < len(data)})
    edges = [0, *inner, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def row(pieces: list[bytes], failure: Failure | None = None) -> dict[str, Any]:
    times = array("d", [1.0 + i for i in range(len(pieces))])
    exchange = Exchange(0.0, 0.5, 1.0 + len(pieces), times, array("d", [0.001] * len(pieces)), pieces, failure)
    return requests_table.row(requests_table.Sent(0, PROMPT, 0, exchange), 8)


def untimed(pieces: list[bytes]) -> dict[str, Any]:
    return {name: value for name, value in row(pieces).items() if name not in OF_TIME | {"t_end"}}


@given(answer=ANSWERS, endpoint=st.sampled_from(ENDPOINTS), framing=st.sampled_from(FRAMINGS), cuts=CUTS)
def test_framing_and_packets_change_no_row(answer: Any, endpoint: str, framing: str, cuts: list[int] | None) -> None:
    whole = untimed([sent_bytes(answer, endpoint, "length")])
    assert untimed(cut(sent_bytes(answer, endpoint, framing), cuts)) == whole
    assert whole["status"] in requests_table.STATUSES


def ends(pieces: list[bytes]) -> list[bool]:
    """Whether the client takes the answer for complete, after each read. Raises WireError."""
    end, reads = AnswerEnd(), [(float(i), piece) for i, piece in enumerate(pieces)]
    return [end.reached(reads[: i + 1]) for i in range(len(reads))]


@given(
    answer=ANSWERS,
    framing=st.sampled_from(["chunked", "length"]),
    cuts=CUTS,
    stray=st.just(b"") | st.binary(min_size=1),
)
def test_the_end_of_an_answer_is_seen_with_its_last_byte(
    answer: Any, framing: str, cuts: list[int] | None, stray: bytes
) -> None:
    """Not before, or the rest would be the next answer; not later, or the client would wait for what never comes."""
    *before, last = cut(sent_bytes(answer, "chat", framing), cuts)
    assert ends([*before, last + stray]) == [False] * len(before) + [True]


@given(answer=ANSWERS, framing=st.sampled_from(FRAMINGS), at=st.integers(0, 5000), cuts=CUTS)
def test_an_answer_cut_anywhere_is_complete_or_has_a_reason(
    answer: Any, framing: str, at: int, cuts: list[int] | None
) -> None:
    found = row(cut(sent_bytes(answer, "chat", framing)[:at], cuts), Failure("truncated", "cut"))
    assert found["status"] in requests_table.STATUSES
    assert found["status"] == "ok" or found["error"]
    judged(found)


HEADS = [
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\n",
    b"HTTP/1.1 500 Oh\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"",
]


@given(
    head=st.sampled_from(HEADS),
    body=st.binary(max_size=200) | st.text('0123456789abcdef;\r\n data:[]{}"', max_size=200).map(str.encode),
    cuts=CUTS,
    failure=st.none() | st.builds(Failure, st.sampled_from(["timeout", "truncated", "connect_error"]), st.just("x")),
)
@example(head=b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", body=b"x", cuts=[], failure=None)
@example(head=b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", body=b"x", cuts=[], failure=None)
@example(head=b"HTTP/1.1 " + b"9" * 5000 + b"\r\n\r\n", body=b"", cuts=[], failure=None)
@example(head="HTTP/1.1 ²²² OK\r\n\r\n".encode("latin-1"), body=b"", cuts=[], failure=None)
@example(head=HEADS[0], body=b"f" * 5000 + b"\r\nx", cuts=[], failure=None)
@example(head=HEADS[0], body=b"-5\r\nhello\r\n0\r\n\r\n", cuts=[], failure=None)
@example(head=HEADS[0], body=b"1_0\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n", cuts=[], failure=None)
@example(head=HEADS[2], body=b"data: " + b"[" * 100_000 + b"\n\n", cuts=[], failure=None)
@example(
    head=HEADS[2], body=b'data: {"usage": {"completion_tokens": 1' + b"0" * 5000 + b"}}\n\n", cuts=[], failure=None
)
def test_bytes_of_any_kind_end_in_a_status(
    head: bytes, body: bytes, cuts: list[int] | None, failure: Failure | None
) -> None:
    pieces = cut(head + body, cuts)
    found = row(pieces, failure)
    assert found["status"] in requests_table.STATUSES
    assert found["status"] == "ok" or found["error"]
    judged(found)
    with suppress(WireError):
        ends(pieces)


@given(
    answer=ANSWERS,
    framing=st.sampled_from(FRAMINGS),
    damage=st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=4)), min_size=1, max_size=4),
)
def test_a_damaged_answer_ends_in_a_status(answer: Any, framing: str, damage: list[tuple[int, bytes]]) -> None:
    data = sent_bytes(answer, "chat", framing)
    for place, other in damage:
        at = place % len(data)
        data = data[:at] + other + data[at + len(other) :]
    judged(row([data]))


def judged(found: dict[str, Any]) -> None:
    """A row can be stored, read again and judged, whatever is in it."""
    assert found["status"] in requests_table.STATUSES
    rows = requests_table.to_frame([found])
    with tempfile.TemporaryDirectory() as folder:
        requests_table.write(rows, Path(folder) / "r.parquet")
        pd.testing.assert_frame_equal(requests_table.read(Path(folder) / "r.parquet"), rows)
    assert metrics.cell_metrics(rows, Load(1), "DDTREE")["requests"] == len(metrics.request_metrics(rows)) == 1
    client = dict.fromkeys(("wall_s", "cpu_s", "reader_wait_s", "run_queue_wait_s"), 0.1)
    document = metrics.document(rows, Load(1), client, server_samples.frame([]), None, 1, None)
    assert document["status"] == ("ok" if found["status"] == "ok" else "failed")


def test_the_strategy_makes_good_and_bad_answers() -> None:
    good = {"events": [{"text": "a"}, {"finish": "stop", "tokens": 1}, "done"]}
    assert row([sent_bytes(good, "chat", "chunked")])["status"] == "ok"
    assert row([sent_bytes({"events": [{"text": "a"}]}, "chat", "chunked")])["status"] == "truncated"
    with pytest.raises(TypeError, match="unknown in an event"):
        sent_bytes({"events": [{"txet": "a"}]}, "chat", "chunked")
