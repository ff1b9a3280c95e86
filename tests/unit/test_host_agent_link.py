"""The conversation with a host agent, a real one that runs here: each question has its own answer, or none in time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import alive, eventually

from ddtree_bench.targets import commands, host_tools
from ddtree_bench.targets.commands import LocalStream
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh.agent import HostAgent
from ddtree_bench.targets.ssh.failures import LinkLost


class Agents:
    """Starts agents of this machine, and knows their process ids."""

    def __init__(self, folder: Path) -> None:
        archive = host_tools.archive(folder)
        self._argv = host_tools.command_line(sys.executable, str(archive), "ddtree_bench.targets.host_agent")
        self.streams: list[LocalStream] = []

    def __call__(self, on_line: Callable[[str], None]) -> LocalStream:
        self.streams.append(LocalStream(self._argv, on_line))
        return self.streams[-1]

    @property
    def pid(self) -> int:
        """The agent that was started last."""
        return self.streams[-1]._process.pid


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(commands, "CLOSE_TIMEOUT_S", 0.5)
    agents = Agents(tmp_path)
    yield agents
    for stream in agents.streams:
        stream.close()


@pytest.fixture
def agent(agents: Agents) -> HostAgent:
    agent = HostAgent(agents)
    agent.open()
    return agent


def test_questions_and_answers(agent: HostAgent, agents: Agents) -> None:
    agent.open()
    assert abs(agent.ask("ping")["monotonic"] - time.monotonic()) < 1
    with pytest.raises(TargetError, match=r"the host agent could not sing: .*is no request; operations: ping, "):
        agent.ask("sing", tune="é\n")
    assert agent.ask("port", port=1)["free"] in (True, False)
    assert len(agents.streams) == 1


def test_threads_get_the_answers_to_their_own_questions(agent: HostAgent) -> None:
    wrong: list[str] = []

    def ask(name: str) -> None:
        for number in range(20):
            with pytest.raises(TargetError) as error:
                agent.ask(f"{name}-{number}")
            if f'"{name}-{number}"' not in str(error.value):
                wrong.append(str(error.value))

    threads = [threading.Thread(target=ask, args=(f"thread-{number}",)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_agent_that_is_killed_is_gone_until_one_is_opened(agent: HostAgent, agents: Agents) -> None:
    os.kill(agents.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(LinkLost):
            agent.ask("ping")
    agent.open()
    assert agent.ask("ping") and len(agents.streams) == 2


def test_an_agent_that_hangs_is_given_up_and_ended(agent: HostAgent, agents: Agents) -> None:
    hung = agents.pid
    os.kill(hung, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(LinkLost, match=r"has not answered within 0\.4 s"):
        agent.ask("ping", timeout_s=0.4)
    assert time.monotonic() - began < 1
    agent.open()
    # Not the late answer to the first question.
    with pytest.raises(TargetError, match='"second"'):
        agent.ask("second")
    assert eventually(lambda: not alive(hung), 10)


def test_who_waits_for_another_question_does_so_for_no_longer_than_for_an_answer(
    agent: HostAgent, agents: Agents
) -> None:
    os.kill(agents.pid, signal.SIGSTOP)
    first = threading.Thread(target=ask_in_vain, args=(agent,))
    first.start()
    time.sleep(0.2)
    with pytest.raises(LinkLost, match="has not answered another question"):
        agent.ask("ping", timeout_s=0.3)
    first.join()


def ask_in_vain(agent: HostAgent) -> None:
    with pytest.raises(LinkLost):
        agent.ask("ping", timeout_s=1)
