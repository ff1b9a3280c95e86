"""Mixed traffic with aborts on a server, and how many KV slots are in use when it has ended."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests
from sglang_server import SGLangServer

VOCABULARY = 250
IDLE_SECONDS = 60


class Traffic(NamedTuple):
    """What was sent: requests by how they ended."""

    finished: int
    disconnected: int
    aborted: int


def rounds(log: Path) -> list[dict[str, Any]]:
    """The rounds of a round log so far, each a batch's."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in map(json.loads, lines) if "meta" not in line]


def send(server: SGLangServer, log: Path, least_rounds: int, clients: int, seed: int = 0) -> Traffic:
    """Let clients send requests of every kind until the server has logged `least_rounds` rounds."""
    enough = threading.Event()
    with ThreadPoolExecutor(clients) as pool:
        working = [
            pool.submit(_client, server, random.Random(seed * 1000 + number), enough) for number in range(clients)
        ]
        try:
            while len(rounds(log)) < least_rounds and not any(client.done() for client in working):
                time.sleep(1)
        finally:
            enough.set()
        counts = [client.result() for client in working]
    return Traffic(*map(sum, zip(*counts, strict=True)))


def used_slots(server: SGLangServer) -> int:
    """KV slots that are neither free nor held by the prefix cache, once no request is left.

    Raises TimeoutError if requests are left after IDLE_SECONDS.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        load = server.get("/v1/loads").json()["loads"][0]
        if load["num_running_reqs"] == load["num_waiting_reqs"] == 0:
            return int(load["num_used_tokens"])
        time.sleep(0.5)
    raise TimeoutError(f"requests are left: {load}")


def _client(server: SGLangServer, source: random.Random, enough: threading.Event) -> tuple[int, int, int]:
    ended = [0, 0, 0]
    while not enough.is_set():
        kind = source.choices(range(3), (0.5, 0.25, 0.25))[0]
        (_finish, _disconnect, _abort)[kind](server, _body(source), source)
        ended[kind] += 1
    return ended[0], ended[1], ended[2]


def _body(source: random.Random) -> dict[str, Any]:
    """A request that may share the beginning of its prompt with others, of any length, greedy or not."""
    shared = random.Random(source.randrange(3)).choices(range(VOCABULARY), k=source.randint(1, 40))
    own = source.choices(range(VOCABULARY), k=source.randint(0, 20))
    sampling = {
        "temperature": source.choice((0, 1.0)),
        "max_new_tokens": source.randint(1, 60),
        "ignore_eos": source.random() < 0.8,
    }
    return {"input_ids": shared + own, "sampling_params": sampling, "rid": uuid.UUID(int=source.getrandbits(128)).hex}


def _finish(server: SGLangServer, body: dict[str, Any], _source: random.Random) -> None:
    server.post("/generate", body).raise_for_status()


def _disconnect(server: SGLangServer, body: dict[str, Any], source: random.Random) -> None:
    """Read some events of the stream and hang up."""
    events = source.randint(0, 6)
    with server.post("/generate", {**body, "stream": True}, stream=True) as answer:
        for _ in zip(range(events), answer.iter_lines(), strict=False):
            pass


def _abort(server: SGLangServer, body: dict[str, Any], source: random.Random) -> None:
    """Abort by id from another connection, at any time of the request's life."""
    timer = threading.Timer(source.uniform(0, 1), server.post, ("/abort_request", {"rid": body["rid"]}))
    timer.start()
    with contextlib.suppress(requests.RequestException):
        server.post("/generate", body)
    timer.join()
