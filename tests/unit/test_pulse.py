"""The pulse against a real host agent of this machine, that is slow, gone for a while, or gone for good."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import eventually
from test_host_agent_link import Agents

from ddtree_bench.targets import commands
from ddtree_bench.targets.commands import LocalStream
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh import pulse
from ddtree_bench.targets.ssh.agent import HostAgent
from ddtree_bench.targets.ssh.failures import LinkLost
from ddtree_bench.targets.ssh.pulse import Pulse
from ddtree_bench.targets.unit_state import parse_show

SHOWN = "Id=ddtree-bench-x.service\nActiveState=active\nSubState=running\n"
UNIT = parse_show(SHOWN)


class Way:
    """Starts agents unless the way to them is closed."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self.closed = False

    def __call__(self, on_line: Callable[[str], None]) -> LocalStream:
        if self.closed:
            raise LinkLost("closed")
        return self._agents(on_line)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(commands, "CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(pulse, "EVERY_S", 0.1)
    monkeypatch.setattr(pulse, "STALL_S", 0.5)
    monkeypatch.setattr(pulse, "PING_S", 2.0)
    agents = Agents(tmp_path)
    yield agents
    for stream in agents.streams:
        stream.close()


@pytest.fixture
def way(agents: Agents) -> Way:
    return Way(agents)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def beating(way: Way, tmp_path: Path, said: list[str]) -> Iterator[Pulse]:
    agent = HostAgent(way)
    agent.open()
    # A scope that systemctl refuses, be there a systemd or not.
    options: dict[str, Any] = {"scope": "nowhere", "ttl_s": 60, "reconnect_s": 1.0, "report": said.append}
    beating = Pulse(agent, str(tmp_path / "x.lease"), "nobody's", **options)
    beating.start()
    yield beating
    beating.stop()


def test_a_link_that_holds(beating: Pulse) -> None:
    since = time.monotonic()
    time.sleep(0.5)
    record = beating.record(since)
    assert record.broken is None and len(record.round_trips_s) >= 3 and 0 < min(record.round_trips_s) < 0.5
    beating.require_link()
    beating.require_lease()


def test_a_link_that_stands_still_for_a_moment(beating: Pulse, agents: Agents) -> None:
    since = time.monotonic()
    os.kill(agents.pid, signal.SIGSTOP)
    time.sleep(0.8)
    os.kill(agents.pid, signal.SIGCONT)
    broken = beating.record(since).broken
    assert broken is not None and broken.startswith("the link stood still for ")
    assert beating.record(time.monotonic()).broken is None and len(agents.streams) == 1


def test_a_link_that_is_cut_before_what_is_measured_and_back_after_it(
    beating: Pulse, agents: Agents, way: Way, said: list[str]
) -> None:
    way.closed = True
    os.kill(agents.pid, signal.SIGKILL)
    assert eventually(lambda: lost(beating), 5)
    since = time.monotonic()
    time.sleep(0.3)
    way.closed = False
    broken = beating.record(since).broken
    assert broken is not None and broken.startswith("the link was cut for ")
    assert said == [f"{broken} and is back"]
    # The new agent was asked to renew a lease that nobody holds.
    with pytest.raises(TargetError, match="the lease on the host was lost: its keeper does not answer"):
        beating.require_lease()


def lost(beating: Pulse) -> bool:
    try:
        beating.look()
    except LinkLost as error:
        return "the link was cut" in str(error)
    return False


def test_a_link_that_does_not_come_back(beating: Pulse, agents: Agents, way: Way) -> None:
    way.closed = True
    since = time.monotonic()
    os.kill(agents.pid, signal.SIGKILL)
    with pytest.raises(LinkLost, match="the host was not reached again within 1 s"):
        beating.record(since)
    with pytest.raises(LinkLost):
        beating.require_link()
    assert time.monotonic() - since < 4


def test_nobody_waits_for_a_pulse_that_was_stopped(beating: Pulse) -> None:
    beating.stop()
    with pytest.raises(LinkLost, match="is watched no more"):
        beating.record(time.monotonic())


def test_a_unit_of_which_the_host_says_nothing(beating: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "OLD_S", 1.0)
    beating.watch(UNIT)
    assert beating.look() == UNIT
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        asked = time.monotonic()
        told = looked(beating)
        assert time.monotonic() - asked < 0.6
        time.sleep(0.1)
    assert told is not None and told.startswith("the host has said nothing of the server for ")
    assert "the host agent could not state: " in told
    assert str(beating.record(began).broken).startswith("the host has said nothing of the server for ")


def test_a_host_that_is_slow_to_tell_of_a_unit_is_no_link_that_stands_still(
    agents: Agents, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / "systemctl"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nsleep 0.8; printf %s {shlex.quote(SHOWN)}\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    agent = HostAgent(way)
    agent.open()
    beating = Pulse(
        agent, str(tmp_path / "x.lease"), "nobody's", scope="system", ttl_s=60, reconnect_s=1.0, report=print
    )
    beating.start()
    beating.watch(UNIT)
    since = time.monotonic()
    time.sleep(1.2)
    assert beating.record(since).broken is None, "the host took 0.8 s, the link next to nothing"
    # The link stands still while the host is asked for the unit.
    os.kill(agents.pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(agents.pid, signal.SIGCONT)
    broken = beating.record(since).broken
    beating.stop()
    assert broken is not None and broken.startswith("the link stood still for ")


class Clock(HostAgent):
    """An agent on a host whose clock is `ahead_s` ahead; a ping takes `there_s` to the host, and no time back."""

    def __init__(self) -> None:
        self.ahead_s, self.there_s, self.pings = 5000.0, 0.001, 0

    def ask(self, operation: str, *, timeout_s: float = 0.0, **values: Any) -> dict[str, Any]:
        assert operation == "ping"
        time.sleep(self.there_s)
        self.pings += 1
        return {"monotonic": time.monotonic() + self.ahead_s, "time": 0.0}


def test_the_difference_of_two_clocks_that_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the shortest of the last round trips, and not of a shorter one that is long past."""
    monkeypatch.setattr(pulse, "EVERY_S", 0.02)
    monkeypatch.setattr(pulse, "CLOCK_S", 1.5)
    clock = Clock()
    beating = Pulse(clock, "", "", scope="system", ttl_s=600, reconnect_s=1.0, report=print)
    beating.start()
    assert beating.clock_offset_s == pytest.approx(5000, abs=0.05)
    before = clock.pings
    clock.there_s = 0.2
    assert eventually(lambda: clock.pings > before + 1, 5)
    assert beating.clock_offset_s == pytest.approx(5000, abs=0.05), "a slow ping is off by half of what it took"
    clock.ahead_s, clock.there_s = 5001.0, 0.02
    assert eventually(lambda: beating.clock_offset_s == pytest.approx(5001, abs=0.05), 10)
    beating.stop()


def looked(beating: Pulse) -> str | None:
    """Why the state of the unit is not known; None when it is."""
    try:
        beating.look()
    except LinkLost as error:
        return str(error)
    return None
