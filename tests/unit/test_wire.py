"""HTTP/1.1 framing: what is sent, where an answer ends, and what is left of it without its framing."""

from __future__ import annotations

import json
import math
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_bench.load.exchange import Exchange
from ddtree_bench.load.wire import AnswerEnd, WireError, parse_answer, read_head, request_bytes

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\n"
CLOSE = b"HTTP/1.0 200 OK\r\n\r\n"


def exchange(*pieces: bytes) -> Exchange:
    times = array("d", [float(i) for i in range(len(pieces))])
    return Exchange(0.0, 0.0, 9.0, times, array("d", [0.001] * len(pieces)), list(pieces), None)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%X\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def test_a_request_is_what_a_server_expects() -> None:
    sent = request_bytes("http://user@[::1]:8000/v1/x?y=1", {"a": "ü"}, {"Authorization": "Bearer t"})
    head, _, body = sent.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[:2] == ["POST /v1/x?y=1 HTTP/1.1", "Host: [::1]:8000"]
    fields = dict(line.split(": ", 1) for line in lines[1:])
    assert fields["Content-Length"] == str(len(body))
    assert fields["Content-Type"] == "application/json"
    assert (fields["Accept-Encoding"], fields["Authorization"]) == ("identity", "Bearer t")
    assert json.loads(body) == {"a": "ü"}


def test_a_host_is_named_as_dns_knows_it_and_once() -> None:
    sent = request_bytes("http://b\u00fccher.example:8000/v1/x", {}, {"host": "other"}).decode()
    assert sent.count("ost: ") == 1
    assert "Host: xn--bcher-kva.example:8000\r\n" in sent


def test_a_body_that_is_chunked() -> None:
    answer = parse_answer(exchange(CHUNKED + b"3\r\nab", b"c\r\n4;x=y\r\nde", b"fg\r\n0\r\nTrailer: 1\r\n", b"\r\n"))
    assert (answer.http_status, answer.content_type, answer.broken) == (200, "text/event-stream", None)
    assert answer.body == [(0.0, 0.001, b"ab"), (1.0, 0.001, b"cde"), (2.0, 0.001, b"fg")]


def test_a_body_with_a_length_ends_there() -> None:
    assert parse_answer(exchange(LENGTH + b"wor", b"ds and more")).body == [(0.0, 0.001, b"wor"), (1.0, 0.001, b"ds")]


def test_a_body_that_ends_with_its_connection() -> None:
    answer = parse_answer(exchange(b"HTTP/1.1 200 OK\n", b"\nab", b"c"))
    assert [piece for _, _, piece in answer.body] == [b"ab", b"c"]


def test_informational_answers_are_passed_over() -> None:
    assert parse_answer(exchange(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH + b"hello")).http_status == 404


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_no_http_says_so(garbage: bytes) -> None:
    assert parse_answer(exchange(garbage)).broken
    with pytest.raises(WireError):
        AnswerEnd().reached([(0.0, garbage, b"")])


@pytest.mark.parametrize("size", [b"xyz", b"-5", b""])
def test_a_broken_chunk_keeps_what_came_before(size: bytes) -> None:
    answer = parse_answer(exchange(CHUNKED + b"2\r\nab\r\n", size + b"\r\nrest"))
    assert [piece for _, _, piece in answer.body] == [b"ab"]
    assert answer.broken is not None
    assert "chunk's size" in answer.broken
    with pytest.raises(WireError, match="chunk's size"):
        AnswerEnd().reached([(0.0, CHUNKED + b"2\r\nab\r\n" + size + b"\r\nrest", b"")])


def test_which_connections_can_be_used_again() -> None:
    kept = {}
    for name, head in {"chunked": CHUNKED, "length": LENGTH, "close": CLOSE}.items():
        found = read_head(head)
        assert found is not None
        kept[name] = found[0].keep_alive
    said = read_head(LENGTH.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n"))
    assert said is not None
    assert kept == {"chunked": True, "length": True, "close": False}
    assert said[0].keep_alive is False


def test_204_has_no_body() -> None:
    assert AnswerEnd().reached([(0.0, b"HTTP/1.1 204 No Content\r\n\r\n", b"")])


@given(
    parts=st.lists(
        st.binary(min_size=1, max_size=40) | st.sampled_from([b"0\r\n\r\n", b"data: 0\r\n\r\n"]), max_size=8
    ),
    places=st.lists(st.integers(0, 2000), max_size=12),
    trailer=st.sampled_from([b"", b"X: 1\r\n"]),
    every=st.integers(1, 4),
)
def test_a_chunked_answer_is_found_to_end_at_its_last_byte_however_it_is_cut(
    parts: list[bytes], places: list[int], trailer: bytes, every: int
) -> None:
    data = CHUNKED + chunked(*parts).removesuffix(b"\r\n") + trailer + b"\r\n"
    pieces, end = cut(data, places), AnswerEnd()
    reads = [(float(number), piece, b"") for number, piece in enumerate(pieces)]
    asked = [number for number in range(len(reads)) if number % every == 0 or number == len(reads) - 1]
    assert [end.reached(reads[: number + 1]) for number in asked] == [False] * (len(asked) - 1) + [True]
    assert end.keeps_connection
    answer = parse_answer(exchange(*pieces))
    assert b"".join(piece for _, _, piece in answer.body) == b"".join(parts)


@given(
    data=st.binary(max_size=200), places=st.lists(st.integers(0, 200), max_size=5), head=st.sampled_from([b"", CHUNKED])
)
def test_no_bytes_make_the_parser_raise(data: bytes, places: list[int], head: bytes) -> None:
    answer = parse_answer(exchange(*cut(head + data, places)))
    assert sum(len(piece) for _, _, piece in answer.body) <= len(data)
    assert all(not math.isnan(lag) for _, lag, _ in answer.body)
