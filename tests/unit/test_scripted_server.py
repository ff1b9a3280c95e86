"""The scripted server itself: what it plays is what it was given, and its stamps are those of what it sent."""

from __future__ import annotations

import socket
import time
from typing import Any, get_args

import pytest
from scripted_server import Packets, Script, ScriptedServer, by_number, chunk, stream, usage_event


def asked(server: ScriptedServer) -> tuple[list[float], bytes]:
    """The moments at which bytes came from the server, and the bytes of its whole answer."""
    host, port = server.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 17\r\n\r\n" + b'{"prompt": "p 0"}')
        moments, whole = [], b""
        while piece := connection.recv(65536):
            moments.append(time.perf_counter())
            whole += piece
    return moments, whole


@pytest.mark.parametrize("framing", ["close", "length", "chunked"])
def test_pieces_leave_after_their_pauses_and_are_stamped_before_they_do(framing: Any) -> None:
    script = Script([(0.03, b"data: a\n\n"), (0.05, b"data: b\n\n")], framing=framing, keep_alive=False)
    with ScriptedServer(lambda _: script) as server:
        moments, whole = asked(server)
    assert whole == b"".join(packet for _, packet in script.sends())
    (played,) = server.played
    head, first, second, end = played.sent
    assert played.received <= head <= first - 0.03 <= second - 0.08
    assert second <= end
    assert second <= moments[-1]
    assert first <= moments[-1] - 0.05


@pytest.mark.parametrize("packets", get_args(Packets))
def test_the_server_plays_what_it_was_given(packets: Any) -> None:
    """Byte for byte, whatever it is cut into."""
    script = stream(chunk(content="a"), usage_event(1), packets=packets, extension=b";x", trailers=b"T: 1\r\n")
    whole = b"".join(packet for _, packet in script.sends())
    assert whole.startswith(
        b"HTTP/1.1 200 Scripted\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    )
    assert whole.endswith(b"\r\n0\r\nT: 1\r\n\r\n")
    assert b"%x;x\r\n" % len(chunk(content="a")) in whole
    assert len(script.sends()) == {"pieces": 4, "one": 1, "bytes": len(whole)}[packets]


def test_every_answer_is_given_by_the_number_of_its_prompt() -> None:
    scripts = [stream(chunk(content=str(i))) for i in range(2)]
    answer = by_number(scripts)
    assert answer({"prompt": "prompt 0"}) is scripts[0]
    assert answer({"messages": [{"content": "prompt 1"}]}) is scripts[1]
    assert answer({"prompt": "prompt 7"}) is scripts[1]
