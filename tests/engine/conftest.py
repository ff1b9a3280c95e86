from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch

from ddtree_reference import startup, tokenizer
from ddtree_reference.decode import Method
from ddtree_reference.startup import Opened

READY_SECONDS = 90
WIDEST = Method("DDTREE", budget=64)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Opened:
    return startup.open_engine("smollm2", "auto", [WIDEST])


@pytest.fixture(scope="session")
def toy() -> Opened:
    return startup.open_engine("toy", "auto", [WIDEST])


def chat_ids(opened: Opened, prompt: str) -> list[int]:
    text = tokenizer.render_chat(opened.tokenizer, [{"role": "user", "content": prompt}])
    return tokenizer.encode(opened.tokenizer, text)


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, path: str, body: object, **options: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=60, **options)  # type: ignore[arg-type]

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(log: Path, *arguments: str, fault: str | None = None) -> Server:
    """Start a server and wait until it is healthy, or return at once when it has ended."""
    port = free_port()
    command = [sys.executable, "-m", "ddtree_reference", "serve", "--port", str(port), *arguments]
    environment = os.environ | ({"DDTREE_REFERENCE_FAULT": fault} if fault else {})
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None:
        try:
            if server.get("/health").status_code == 200:
                break
        except requests.ConnectionError:
            if time.monotonic() > deadline:
                end(server)
                pytest.fail(f"no server after {READY_SECONDS} s: {log.read_text()}")
            time.sleep(0.05)
    return server


def end(server: Server) -> None:
    server.process.terminate()
    try:
        server.process.wait(10)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


Launch = Callable[..., Server]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    servers: list[Server] = []

    def start(*arguments: str, fault: str | None = None) -> Server:
        server = launch(tmp_path_factory.mktemp("server") / "log", *arguments, fault=fault)
        servers.append(server)
        return server

    yield start
    for server in servers:
        end(server)


@pytest.fixture(scope="module")
def toy_ar(serve: Launch) -> Server:
    return serve("--model", "toy")


@pytest.fixture(scope="module")
def toy_ddtree(serve: Launch) -> Server:
    budget = ("--speculative-ddtree-budget", "16", "--speculative-ddtree-topk-cap", "4")
    return serve("--model", "toy", "--speculative-algorithm", "DDTREE", *budget, "--start-id", "start-7")


@pytest.fixture(scope="module")
def toy_dflash(serve: Launch) -> Server:
    return serve("--model", "toy", "--speculative-algorithm", "DFLASH")
