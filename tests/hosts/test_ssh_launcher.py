"""The ssh launcher on real hosts: what a launcher promises, whoever logs in, and that nothing of it is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab import Lab
from launching import BIND, PYTHON, TINY, Ground
from logins import Scope
from nspawn import Host
from processes import children, eventually

from ddtree_bench.servers import api
from ddtree_bench.targets.launcher import PortInUse, TargetError
from ddtree_bench.targets.lease import TargetBusy
from ddtree_bench.targets.ssh.launcher import SshLauncher
from ddtree_bench.targets.ssh.systemd import ScopeRefused

MIB = 1 << 20
SECRET = "hf_ a'b\"c$d%e\\ ü"


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    """A host with a login that may use sudo, and one that has a service manager of its own."""
    host = lab.start("launch", bind_ro=BIND)
    host.add_user("sam", sudo=True)
    host.add_user("una", lingering=True)
    host.add_user("bob")
    yield host
    lab.remove(host)


@pytest.fixture
def ground(lab: Lab, host: Host, tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(lab, host, tmp_path)
    yield ground
    ground.close()


@pytest.fixture(params=[("root", "system"), ("sam", "system"), ("una", "user")], ids=["root", "sudo", "user"])
def any_ground(lab: Lab, host: Host, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ground]:
    """Each way to run units."""
    user, scope = request.param
    ground = Ground(lab, host, tmp_path, user, scope)
    yield ground
    ground.close()


def healthy(launcher: SshLauncher) -> bool:
    return eventually(lambda: api.health(launcher.base_url()), 10)


def chatty(words: str, port: int) -> tuple[str, ...]:
    """A tiny server that first prints some words."""
    return ("/bin/sh", "-c", 'echo "$1"; shift; exec "$@"', "sh", words, PYTHON, TINY, "--port", str(port))


def test_what_a_launcher_promises(any_ground: Ground) -> None:
    ground, host = any_ground, any_ground.host
    with ground.leased(memory_max_bytes=256 * MIB) as launcher:
        port = launcher.free_port()
        words = ("first line", "  änd % $ a \\ second one")
        logs = []
        for word in words:
            launch = ground.launch(
                port, *chatty(word, port), env={"SHOWN": "a b%c$d"}, private_env={"HF_TOKEN": SECRET}
            )
            launcher.start(launch)
            assert healthy(launcher)
            state = launcher.state()
            assert state.alive and state.pid is not None and launcher.log_tail().splitlines()[-1] == "loading weights"

            environ = host.exec("cat", f"/proc/{state.pid}/environ").split("\0")
            assert f"HF_TOKEN={SECRET}" in environ and "SHOWN=a b%c$d" in environ
            assert host.exec("stat", "-c", "%U", f"/proc/{state.pid}").strip() == ground.user
            unit = ground.unit()
            told = shown(ground, unit)
            assert f"MemoryMax={256 * MIB}" in told and "SHOWN=a b%c" in told
            assert "hf_" not in told and "hf_" not in host.exec("sh", "-c", f"cat $(find /run -name '{unit}')")
            assert not host.exec("find", "/run", "-name", "*.env", "-path", "*ddtree-bench*")

            began = time.monotonic()
            ended = launcher.stop()
            assert time.monotonic() - began < 2
            assert ended.reason == "requested" and not ended.alive and not ended.ended_by_itself
            assert launcher.stop() == launcher.state() == ended and not api.health(launcher.base_url())
            with pytest.raises(Exception, match="exit status 1"):
                host.exec("test", "-d", f"/proc/{state.pid}")
            logs.append(launch.log_path.read_text())
        assert logs == [f"{word}\nloading weights\n" for word in words] and not children("ssh")
    assert ground.left() == "" and "hf_" not in "".join(ground.said)


def shown(ground: Ground, unit: str) -> str:
    """What systemd shows of a unit."""
    if ground.scope == "system":
        return str(ground.host.exec("systemctl", "show", unit))
    runtime = f"XDG_RUNTIME_DIR=/run/user/{ground.host.exec('id', '-u', ground.user).strip()}"
    return str(ground.host.exec("env", runtime, "systemctl", "--user", "show", unit, user=ground.user))


def test_the_state_is_told_at_once(ground: Ground) -> None:
    with ground.leased() as launcher:
        launcher.start(ground.tiny(launcher))
        took = []
        for _ in range(12):
            began = time.monotonic()
            assert launcher.state().pid is not None
            took.append(time.monotonic() - began)
            time.sleep(0.2)
        assert max(took) < 0.5
        assert abs(launcher.clock_offset_s()) < 0.05


def test_a_second_server_and_a_start_without_the_lease_are_refused(ground: Ground) -> None:
    with ground.leased() as launcher:
        first = ground.tiny(launcher)
        launcher.start(first)
        with pytest.raises(TargetError, match="another server of this launcher still runs; stop it first"):
            launcher.start(ground.tiny(launcher))
        assert healthy(launcher) and launcher.free_port() != first.port
    with pytest.raises(TargetError, match="the target's lease must be acquired first"):
        launcher.start(first)
    assert ground.left() == ""


def test_a_port_in_use_is_refused_with_its_holder_who_lives(ground: Ground) -> None:
    with ground.leased() as launcher:
        port = launcher.free_port()
        with stranger(ground.host, port):
            with pytest.raises(PortInUse, match=rf"box: port {port}, wanted .* process \d+ \({PYTHON} "):
                launcher.start(ground.tiny(launcher, port=port))
            assert launcher.stop() == launcher.state() and not launcher.state().alive
            assert answers(ground.host, port)


@contextmanager
def stranger(host: Host, port: int) -> Iterator[None]:
    """Somebody else's server on a port of a host."""
    host.exec("systemd-run", "--quiet", "--unit=stranger", PYTHON, TINY, "--port", str(port))
    try:
        assert eventually(lambda: answers(host, port), 10)
        yield
    finally:
        host.exec("systemctl", "stop", "stranger")


def answers(host: Host, port: int) -> bool:
    program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
    return "refused" not in host.exec("sh", "-c", f'{PYTHON} -c "$1" 2>&1', "sh", program, check=False)


def test_another_owner_is_named_and_left_alone(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "bob")
    theirs = ground.launcher()
    with theirs.acquire("their-run", 0, print) as lease:
        theirs.start(ground.tiny(theirs))
        monkeypatch.setenv("LOGNAME", "ann")
        ours = ground.launcher()
        began = time.monotonic()
        with pytest.raises(TargetBusy, match=r"machine.lease is held by bob \(host .*, run their-run, w") as busy:
            ours.acquire("run", 1.5, ground.said.append)
        assert 1.5 < time.monotonic() - began < 6
        assert f"workflow {Path.cwd()}) since 20" in str(busy.value) and "raise targets.box.lease_wait_s" in str(
            busy.value
        )
        assert "waiting, for the lease" in ground.said[-1] and "held by bob" in ground.said[-1]
        assert not ours.stop().alive and ours.stop_all() == []
        assert "left alone, for the lease is held by bob" in ground.said[-1]
        assert healthy(theirs) and theirs.state().alive

        threading.Timer(1.0, theirs.stop).start()
        threading.Timer(2.5, lease.release).start()
        with ours.acquire("run", 20, ground.said.append):
            assert ours.state() == ours.stop()
    assert ground.left() == ""


def test_stop_all_ends_what_this_user_holds_under_this_lease_alone(ground: Ground) -> None:
    elsewhere = Ground(ground.lab, ground.host, ground.folder)
    with elsewhere.leased() as other, ground.leased() as launcher:
        other.start(elsewhere.tiny(other))
        launcher.start(ground.tiny(launcher))
        assert healthy(other) and healthy(launcher)
        pid = launcher.state().pid
        assert ground.launcher().stop_all() == [f"ddtree-bench: server tiny (process {pid})"]
        assert ground.launcher().stop_all() == []
        assert not launcher.state().alive and launcher.state().reason in ("lease", "removed")
        assert healthy(other) and other.state().alive
    elsewhere.close()
    assert ground.left() == ""


def test_a_login_without_rights_is_refused(lab: Lab, host: Host, tmp_path: Path) -> None:
    scopes: list[tuple[Scope, str]] = [("system", "or set scope: user"), ("user", "loginctl enable-linger bob")]
    for scope, remedy in scopes:
        ground = Ground(lab, host, tmp_path, "bob", scope)
        with pytest.raises(ScopeRefused, match=rf"targets\.box\.scope: .*{remedy}"):
            ground.launcher().acquire("run", 0, print)
        ground.close()
    assert ground.left() == ""
