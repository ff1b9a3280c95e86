"""Reference servers for tests: prompts as token ids, and servers started and ended by process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from ddtree_reference import tokenizer
from ddtree_reference.startup import Opened

READY_SECONDS = 90
ANSWER_SECONDS = 60


def chat_ids(opened: Opened, prompt: str) -> list[int]:
    text = tokenizer.render_chat(opened.tokenizer, [{"role": "user", "content": prompt}])
    return tokenizer.encode(opened.tokenizer, text)


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, path: str, body: object, **options: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=ANSWER_SECONDS, **options)  # type: ignore[arg-type]

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
