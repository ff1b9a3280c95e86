"""The host agent: each operation through its pipe, and what it does with nonsense."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_bench.targets import host_tools, lease
from ddtree_bench.targets.lease_keeper import Keeper


class Agent:
    """An agent as a host runs it: from the archive, with nothing else."""

    def __init__(self, archive: Path, **env: str) -> None:
        argv, variables = host_tools.command(sys.executable, str(archive), "ddtree_bench.targets.host_agent")
        self.process = subprocess.Popen(
            argv, env={"PATH": os.defpath, **variables, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def send(self, line: bytes) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    def ask(self, operation: str, **values: Any) -> dict[str, Any]:
        return self.send(json.dumps({"op": operation, **values}).encode())

    def close(self) -> int:
        self.process.communicate(timeout=5)
        return self.process.returncode


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return host_tools.archive(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def start(archive: Path) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def one(**env: str) -> Agent:
        agents.append(Agent(archive, **env))
        return agents[-1]

    yield one
    for agent in agents:
        agent.process.kill()
        agent.process.communicate()


@pytest.fixture
def agent(start: Callable[..., Agent]) -> Agent:
    return start()


def test_ping_tells_both_clocks(agent: Agent) -> None:
    before = time.monotonic()
    answer = agent.ask("ping")
    assert before <= answer["monotonic"] <= time.monotonic()
    assert abs(answer["time"] - time.time()) < 5


def test_it_ends_with_its_input(agent: Agent) -> None:
    agent.ask("ping")
    assert agent.close() == 0


def test_it_ends_when_nobody_reads_its_answers(agent: Agent) -> None:
    assert agent.process.stdin is not None and agent.process.stdout is not None
    agent.process.stdout.close()
    agent.process.stdin.write(b'{"op": "ping"}\n' * 2)
    agent.process.stdin.flush()
    agent.process.wait(10)


@pytest.mark.parametrize(
    "line",
    [b"", b"ping", b"[]", b"7", b'{"op": 7}', b'{"op": ["ping"]}', b"\xff\xfe", b'{"op": "reboot"}', b"[" * 100_000],
)
def test_what_is_no_request_is_answered_and_does_no_harm(agent: Agent, line: bytes) -> None:
    error = agent.send(line)["error"]
    assert "is no request; operations: ping, renew" in error and len(error) < 1000
    assert "monotonic" in agent.ask("ping")


@pytest.mark.parametrize(
    ("operation", "values"),
    [
        ("port", {}),
        ("port", {"port": "x"}),
        ("port", {"port": 1, "host": 3}),
        ("state", {"scope": "system"}),
        ("holder", {"lease": None}),
        ("renew", {}),
    ],
)
def test_what_cannot_be_answered_says_why(agent: Agent, operation: str, values: dict[str, Any]) -> None:
    assert agent.ask(operation, **values)["error"].startswith(f"{operation}: ")
    assert "monotonic" in agent.ask("ping")


def test_answers_come_in_the_order_of_the_requests(agent: Agent) -> None:
    assert agent.process.stdin is not None and agent.process.stdout is not None
    agent.process.stdin.write(b'{"op": "ping"}\n{"op": "free_port"}\nx\n{"op": "ping"}\n')
    agent.process.stdin.flush()
    answers = [json.loads(agent.process.stdout.readline()) for _ in range(4)]
    assert [next(iter(answer)) for answer in answers] == ["monotonic", "port", "error", "monotonic"]


def test_who_holds_a_lease(agent: Agent, tmp_path: Path) -> None:
    path = str(tmp_path / "machine.lease")
    nobody = {"held": False, "owner": None, "words": "nobody"}
    assert agent.ask("holder", lease=path) == nobody
    with lease.acquire("machine", tmp_path, run="local run") as held:
        answer = agent.ask("holder", lease=path)
        assert answer["held"] and answer["owner"]["run"] == "local run" and answer["words"] == str(held.owner)
        assert answer["owner"]["workflow"] == held.owner.workflow != ""
    assert agent.ask("holder", lease=path) == nobody


def test_a_lease_that_is_held_but_not_signed(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "machine.lease"
    descriptor = lease.take(path)
    answer = agent.ask("holder", lease=str(path))
    os.close(descriptor)
    assert answer == {"held": True, "owner": None, "words": "an owner that has not signed it"}


def test_a_lease_is_renewed_at_its_keeper_alone(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "machine.lease"
    owner = lease.Owner("ann", "laptop", 7, "r1", "then", "/w")
    signals, stop = socket.socketpair()
    descriptor = lease.take(path)
    keeper = Keeper(path, descriptor, owner, "token-of-ann", 30)
    thread = threading.Thread(target=keeper.hold, args=(signals,))
    thread.start()
    signed_at = lease.read(path)["renewed_at"]  # type: ignore[index]
    try:
        assert agent.ask("renew", lease=str(path), token="token-of-ann") == {"renewed": True, "why": None}
        refused = agent.ask("renew", lease=str(path), token="token-of-bob")
    finally:
        stop.send(b"x")
        thread.join()
        os.close(descriptor)
    assert lease.read(path)["renewed_at"] > signed_at  # type: ignore[index]
    assert refused["renewed"] is False and "held by ann (host laptop" in refused["why"]
    gone = agent.ask("renew", lease=str(path), token="token-of-ann")
    assert gone["renewed"] is False and "held by nobody" in gone["why"]


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")])
def test_a_port_that_is_taken_is_told_with_its_process(agent: Agent, family: int, address: str) -> None:
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        number = listener.getsockname()[1]
        answer = agent.ask("port", port=number)
        assert answer["free"] is False and f"process {os.getpid()} (" in answer["holder"]
    assert agent.ask("port", port=number) == {"free": True, "holder": "nobody"}


@pytest.mark.parametrize(("operation", "number"), [("port", 8000), ("free_port", 0)])
def test_an_address_that_the_host_does_not_have_is_not_taken_for_a_port_in_use(
    agent: Agent, operation: str, number: int
) -> None:
    error = agent.ask(operation, port=number, host="192.0.2.1")["error"]
    assert error.startswith(f"the target's host 192.0.2.1 cannot be listened on, port {number}: Cannot assign")


def test_a_free_port_can_be_listened_on(agent: Agent) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", agent.ask("free_port")["port"]))


def test_memory_of_gpus(start: Callable[..., Agent], tmp_path: Path) -> None:
    assert start(PATH=str(tmp_path)).ask("gpu_memory") == {"used_mib": None}
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '4\\n81072\\n[N/A]\\n'\n")
    smi.chmod(0o755)
    assert start(PATH=f"{tmp_path}:{os.defpath}").ask("gpu_memory") == {"used_mib": [4, 81072]}
    smi.write_text("#!/bin/sh\necho NVML: driver mismatch\nexit 9\n")
    assert "exit status 9" in start(PATH=f"{tmp_path}:{os.defpath}").ask("gpu_memory")["error"]


def test_without_systemd_a_unit_is_an_error_in_words(start: Callable[..., Agent], tmp_path: Path) -> None:
    agent = start(PATH=str(tmp_path))
    assert "systemctl --system" in agent.ask("state", scope="system", unit="x.service")["error"]
    assert "systemctl --user" in agent.ask("state", scope="user", unit="x.service")["error"]
