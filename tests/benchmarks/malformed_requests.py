"""Send thousands of malformed and nearly valid requests to a server of the toy model, over real sockets.

    python tests/benchmarks/malformed_requests.py [--requests 10000] [--seed 0]

Each is answered by a whole 200 or by an error object with a status of 4xx; the first that is not is shown, shrunk, and
the exit status is 1. For one in twenty the HTTP itself is damaged too, and then an answer below 500, or none at all,
will do. Counts of answers by status are printed at the end.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from engine_server import Server, end, launch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from malformed_strategies import Request, complaint, requests

TIMEOUT_S = 60
GOOD = {"messages": [{"role": "user", "content": "Write a poem"}], "max_tokens": 40, "temperature": 0}

Answer = tuple[int, dict[str, str], bytes]


def wire(request: Request) -> bytes:
    """The request as HTTP/1.1, on a connection that is closed after it."""
    own = [("host", "toy"), ("connection", "close"), ("content-length", str(len(request.body)))]
    lines = [f"{name}: {value}\r\n" for name, value in (*own, *request.headers)]
    return f"{request.method} {request.path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1") + request.body


def exchange(port: int, data: bytes, half_close: bool = False) -> bytes:
    """All that comes back. With `half_close` the server learns that no more will come, however much it waits for."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(2**16):
                received += piece
        except ConnectionError:
            pass
    return received


def understood(received: bytes) -> Answer | None:
    """Status, headers and body of a response, chunks put together; None if nothing came."""
    if not received:
        return None
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = dechunked(body)
    return int(first.split()[1]), headers, body


def dechunked(body: bytes) -> bytes:
    """The content of a chunked body."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return content


def bombard(server: Server, count: int, number: int) -> Counter[str]:
    """Send the requests; raises AssertionError for the first that is not answered as it must be."""
    port, seen = int(server.url.rsplit(":", 1)[1]), Counter[str]()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(request=requests(), at=st.integers(0, 200), junk=st.binary(min_size=1, max_size=9))
    def one(request: Request, at: int, junk: bytes) -> None:
        data = wire(request)
        if zlib.crc32(data) % 20 == 0:
            answer = understood(exchange(port, data[:at] + junk + data[at:], half_close=True))
            seen[f"damaged HTTP: {answer[0] if answer else 'no answer'}"] += 1
            assert answer is None or answer[0] < 500, answer
        else:
            answer = understood(exchange(port, data))
            assert answer is not None, "no answer"
            seen[f"{answer[0]} {answer[1].get('content-type', '')}"] += 1
            assert (wrong := complaint(*answer, head=request.method == "HEAD")) is None, (wrong, answer)
        assert server.process.poll() is None, "the server has ended"

    one()
    return seen


def main() -> int:
    """Start a server, send the requests, ask it a good one, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = launch(Path(folder) / "log", "--model", "toy", "--speculative-algorithm", "DDTREE")
        try:
            before, began = server.post("/v1/chat/completions", GOOD).json()["choices"], time.monotonic()
            seen = bombard(server, options.requests, options.seed)
            seconds = time.monotonic() - began
            same = server.post("/v1/chat/completions", GOOD).json()["choices"] == before
            log = server.log.read_text()
        finally:
            end(server)
    for kind, number in sorted(seen.items()):
        print(f"{number:6d}  {kind}")
    tracebacks = log.count("Traceback")
    print(
        f"{seen.total()} requests in {seconds:.0f} s; {tracebacks} tracebacks in the log; same answer as before: {same}"
    )
    return 0 if same and not tracebacks else 1


if __name__ == "__main__":
    sys.exit(main())
