"""The memory limit of a unit, on a machine with all of cgroup v2: the kernel kills, and systemd knows why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab import Lab
from logins import Login, seen
from vm import VirtualMachine

from ddtree_bench.targets.ssh.reasons import reason

PYTHON = "/usr/bin/python3"
MIB = 1 << 20

RANKS = """
import os, resource, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
limits = [resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
print("ranks are up", limits, flush=True)
if os.fork() == 0:
    taken = [bytearray(16 << 20) for _ in range(1000)]
time.sleep(1000)
"""
"""Two processes: one takes memory without end, the other waits for it, also when it is asked to stop."""


@pytest.fixture
def login(lab: Lab, vm: VirtualMachine) -> Iterator[Login]:
    login = Login(lab.client_config, vm.name, "root", "system")
    yield login
    login.close()


def test_a_server_over_its_memory_limit_ends_as_a_whole_and_the_reason_is_told(login: Login) -> None:
    unit = login.unit(PYTHON, "-c", RANKS, memory_max_bytes=128 * MIB, stop_grace_s=200.0)
    login.start(unit)
    state = seen(lambda: login.systemd.state(unit.name), lambda state: not state.alive, timeout_s=100)
    assert (state.result, state.oom) == ("oom-kill", True)
    log, _ = login.systemd.journal(unit.name, None, ended=True)
    # In the lab's containers not even root may raise the limits of its processes.
    assert log == "ranks are up [1048576, -1]\n"
    assert reason(state, log, unit) == (
        "killed by the kernel for want of memory (OOM kill): it went over its limit of 0.125 GiB (memory_max_gib)"
    )
