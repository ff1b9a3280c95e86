"""Servers on real hosts that end: the wait ends with them, and who ended them, and why, is told in words."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lab import Lab
from launching import BIND, PROGRAMS, PYTHON, TINY, TOY, Ground, once_ended
from nspawn import Host
from processes import children, eventually

from ddtree_bench.servers import api
from ddtree_bench.servers.ready import ServerFailed, wait_until_ready
from ddtree_bench.targets.launcher import LINK_LOST, TargetError
from ddtree_bench.targets.ssh import agent, stream
from ddtree_bench.targets.ssh.launcher import SshLauncher

MIB = 1 << 20

BINDS_LATE = "import socket, sys, time; time.sleep(2); socket.create_server(('127.0.0.1', int(sys.argv[1])))"
TAKES_MEMORY = "import time; time.sleep(1); taken = [bytearray(16 << 20) for _ in range(100)]; time.sleep(600)"


BROKEN = "/opt/broken"
STRANGER = "/opt/stranger"


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    host = lab.start("failures", bind_ro=BIND)
    host.write_file(BROKEN, "#!/opt/no/interpreter\n", mode=0o755)
    # Of another name than the servers of launchers.
    host.write_file(STRANGER, f"import sys; sys.path[:0] = ['{PROGRAMS}']; from tiny_server import main; main()\n")
    yield host
    lab.remove(host)


@pytest.fixture
def ground(lab: Lab, host: Host, tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(lab, host, tmp_path)
    yield ground
    ground.close()
    assert ground.left() == "" and not children("ssh")


def failure(ground: Ground, launcher: SshLauncher, *argv: str, timeout_s: float = 30.0) -> ServerFailed:
    """Start a server that fails, and wait for it as a run does."""
    launcher.start(ground.launch(int(argv[-1]) if argv[-1].isdigit() else launcher.free_port(), *argv))
    with pytest.raises(ServerFailed) as failed:
        wait_until_ready(
            launcher.base_url,
            TOY,
            "s1",
            state=launcher.state,
            log_tail=launcher.log_tail,
            timeout_s=timeout_s,
            progress=ground.said.append,
            watched_link=launcher.watched_link,
        )
    return failed.value


def ended_s(ground: Ground) -> float:
    """How long ago the server ended."""
    exit_time = ["--property=ExecMainExitTimestampMonotonic", "--value"]
    told = ground.host.exec("systemctl", "show", *exit_time, ground.unit())
    # Host and this machine have one clock.
    return time.monotonic() - int(told) / 1e6


def test_servers_that_fail(ground: Ground) -> None:
    tiny = (PYTHON, TINY, "--port", "1")
    cases = {
        (*tiny, "--budget", "many"): "ended with exit status 2: unrecognized arguments: --budget many",
        (*tiny, "--exit", "3", "--load-s", "3"): "ended with exit status 3",
        ("/bin/sh", "-c", "sleep 1; kill -SEGV $$"): "killed by SIGSEGV",
        ("/bin/sh", "-c", "echo served; exit 0"): "ended with exit status 0",
        (PYTHON, "/opt/no such engine.py"): "ended with exit status 2",
        (PYTHON, "-c", "open('/opt/no model')"): "ended with exit status 1: there is no file /opt/no model",
        (BROKEN,): f"not started: its program {BROKEN} is not there or cannot be executed (203/EXEC)",
    }
    with ground.leased() as launcher:
        for argv, words in cases.items():
            failed = failure(ground, launcher, *argv)
            assert ended_s(ground) < 2.5
            assert failed.reason.startswith(f"server toy-ar {words}"), failed.reason
            state = launcher.state()
            assert state.reason == "exited" and state.ended_by_itself and str(state).startswith(words)
            assert state.signal == (signal.SIGSEGV if "SIGSEGV" in words else None)
            assert "--exit" not in argv or failed.log_tail == "loading weights\nout of memory while capturing graphs"
            assert launcher.stop() == state


def test_a_server_that_hangs(ground: Ground) -> None:
    with ground.leased() as launcher:
        port = str(launcher.free_port())
        failed = failure(ground, launcher, PYTHON, TINY, "--load-s", "600", "--port", port, timeout_s=2)
        assert failed.reason.startswith("server toy-ar was not ready within 2 s") and launcher.state().alive
        assert launcher.stop().reason == "requested"


def test_a_server_that_ignores_being_asked_to_end_is_killed_with_its_children(ground: Ground) -> None:
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher, "--ignore-term", "--child-pid-file", "/run/child.pid", stop_grace_s=1.0))
        assert eventually(lambda: api.health(launcher.base_url()), 10)
        child = ground.host.exec("cat", "/run/child.pid")
        began = time.monotonic()
        assert launcher.stop().signal == 9
        assert time.monotonic() - began < 4
        assert "gone" in ground.host.exec("sh", "-c", f"test -d /proc/{child} || echo gone")


def test_a_server_over_its_memory_limit(ground: Ground) -> None:
    """Under cgroups of version 1 an OOM kill looks like any SIGKILL."""
    with ground.leased(memory_max_bytes=64 * MIB) as launcher:
        failed = failure(ground, launcher, PYTHON, "-c", TAKES_MEMORY)
        words = "killed by SIGKILL, as the kernel does to a unit over its memory limit of 0.0625 GiB (memory_max_gib)"
        assert f"server toy-ar {words}" in failed.reason and ended_s(ground) < 2.5


def test_a_program_that_is_not_there_is_refused_before_it_is_started(ground: Ground) -> None:
    with ground.leased() as launcher:
        with pytest.raises(TargetError, match=r"Command /opt/no/python is not executable: No such file or directory"):
            launcher.start(ground.launch(launcher.free_port(), "/opt/no/python", "-m", "engine"))
        launcher.stop()


def test_a_port_that_somebody_takes_before_the_server_does(ground: Ground) -> None:
    with ground.leased() as launcher:
        port = launcher.free_port()
        launcher.start(ground.launch(port, PYTHON, "-c", BINDS_LATE, str(port)))
        ground.host.exec("systemd-run", "--quiet", "--unit=stranger", PYTHON, STRANGER, "--port", str(port))
        try:
            ended = once_ended(launcher)
            assert str(ended) == "ended with exit status 1: its port is in use"
            assert launcher.stop() == ended
            assert ground.host.exec("systemctl", "is-active", "stranger").strip() == "active"
        finally:
            ground.host.exec("systemctl", "stop", "stranger")


def test_a_server_that_is_stopped_there(ground: Ground) -> None:
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher))
        ground.host.exec("systemctl", "stop", ground.unit())
        ended = once_ended(launcher)
        assert str(ended) == "was stopped on the host (systemctl stop)" and not ended.ended_by_itself


def test_a_keeper_that_is_killed_takes_the_server_with_it(ground: Ground) -> None:
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher))
        ground.host.exec("systemctl", "kill", "--signal=KILL", ground.unit("lease"))
        ended = once_ended(launcher)
        assert ended.reason == "lease" and not ended.ended_by_itself
        assert re.search(r"was stopped with the lease .*: its keeper ddtree-bench-lease-.* SIGKILL", str(ended))
        assert launcher.stop() == ended
    with launcher.acquire("again", 0, print):
        launcher.start(ground.tiny(launcher))
        assert launcher.state().alive
        launcher.stop()


def test_an_agent_that_is_killed_or_hangs(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "ANSWER_S", 2.0)
    monkeypatch.setattr("ddtree_bench.targets.ssh.pulse.ANSWER_S", 2.0)
    monkeypatch.setattr("ddtree_bench.targets.ssh.pulse.PING_S", 2.0)
    monkeypatch.setattr(stream, "CLOSE_TIMEOUT_S", 1.0)
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher))
        pid = launcher.state().pid
        for name in ("KILL", "STOP"):
            agents = processes(ground.host, "[h]ost_agent")
            assert len(agents) == 1
            with launcher.watched_link() as link:
                ground.host.exec("kill", f"-{name}", *agents)
                assert eventually(lambda: launcher.state().reason == LINK_LOST, 5)
                broken = link().broken
            assert broken is not None
            assert eventually(lambda: launcher.state().pid == pid, 5)
            assert eventually(lambda agents=agents: not agents & processes(ground.host, "[h]ost_agent"), 10)
        assert api.health(launcher.base_url())


def processes(host: Host, pattern: str) -> set[str]:
    """The process ids of what runs on a host."""
    return set(host.exec("pgrep", "-f", pattern, check=False).split())


def test_a_connection_that_hangs(ground: Ground) -> None:
    """As on a machine that is out of memory: what was opened gives no answer, and what is opened anew does."""
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher))
        pid = launcher.state().pid
        (agent,) = processes(ground.host, "[h]ost_agent")
        session = ground.host.exec("ps", "-o", "ppid=", agent).strip()
        ground.host.exec("kill", "-STOP", session)
        try:
            assert eventually(lambda: launcher.state().reason == LINK_LOST, 5)
            assert eventually(lambda: launcher.state().pid == pid, 30)
            assert launcher.stop().reason == "requested"
        finally:
            ground.host.exec("kill", "-KILL", session, check=False)


def test_a_host_that_is_started_again(ground: Ground, make_host: Callable[..., Host]) -> None:
    host = make_host("reboots", bind_ro=BIND)
    there = replace(ground, host=host, launchers=[])
    with there.leased() as launcher:
        launcher.start(there.tiny(launcher))
        host.reboot()
        ended = once_ended(launcher, 40)
        assert (ended.reason, str(ended)) == ("rebooted", "is gone: the host was started again")
        assert not ended.ended_by_itself and launcher.stop() == ended
        with pytest.raises(TargetError, match="the lease on the host was lost"):
            launcher.start(there.tiny(launcher))
    with launcher.acquire("again", 0, print):
        launcher.start(there.tiny(launcher))
        assert launcher.state().alive
        launcher.stop()
    there.close()
