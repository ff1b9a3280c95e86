"""The lease keeper without systemd: what it holds, how it is renewed, and when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from processes import eventually

from ddtree_bench.targets import lease, lease_keeper
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.service_manager import notify

OWNER = {"user": "ann", "host": "laptop", "pid": 7, "run": "r1", "since": "then", "workflow": "/home/ann/w"}

ALONE = """
import socket, sys
from pathlib import Path
from ddtree_bench.targets import lease, lease_keeper
path, token, ttl = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
owner = lease.Owner("ann", "laptop", 7, "r1", "then", "/w")
keeper = lease_keeper.Keeper(path, lease.take(path), owner, token, ttl)
print("held", flush=True)
signals = socket.socketpair()
print(keeper.hold(signals[0]), flush=True)
"""


class Holding:
    """A keeper that holds a lease in a thread of this process."""

    def __init__(self, path: Path, ttl_s: float) -> None:
        self.token = uuid4().hex
        self.signals, self._signal = socket.socketpair()
        self._descriptor = lease.take(path)
        self._keeper = lease_keeper.Keeper(path, self._descriptor, lease.Owner.read(OWNER), self.token, ttl_s)
        self.ended_at = 0.0
        self.why = ""
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()

    def _hold(self) -> None:
        self.why = self._keeper.hold(self.signals)
        self.ended_at = time.monotonic()

    def ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        self._signal.send(b"x")
        self._thread.join()
        os.close(self._descriptor)


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[float], Holding]]:
    held: list[Holding] = []

    def start(ttl_s: float) -> Holding:
        held.append(Holding(tmp_path / "machine.lease", ttl_s))
        return held[-1]

    yield start
    for one in held:
        one.end()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[[float], tuple[subprocess.Popen[str], str]]]:
    """A keeper as a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(ttl_s: float) -> tuple[subprocess.Popen[str], str]:
        token = uuid4().hex
        argv = [sys.executable, "-c", ALONE, str(tmp_path / "machine.lease"), token, str(ttl_s)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process, token

    yield start
    for process in started:
        process.kill()
        process.communicate()


def run_keeper(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ddtree_bench.targets.lease_keeper", "--lease", str(path), "--token", uuid4().hex]
    argv += ["--ttl", "5", "--owner", json.dumps(OWNER), "--unit", "ddtree-bench-lease-x.service", "--scope", "system"]
    return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=30, check=False)


def test_it_holds_the_same_lock_as_local_runs_and_names_the_owner(
    hold: Callable[[float], Holding], tmp_path: Path
) -> None:
    hold(30)
    with pytest.raises(
        lease.TargetBusy, match=r"ann \(host laptop, process 7, run r1, workflow /home/ann/w\) since then"
    ):
        lease.acquire("machine", tmp_path, run="local")


def test_a_lease_that_nobody_renews_ends_after_its_time(hold: Callable[[float], Holding]) -> None:
    began = time.monotonic()
    held = hold(1.0)
    assert held.ended(10) and held.why == "the lease has not been renewed for 1 s"
    assert 1.0 <= held.ended_at - began < 2.0


def test_renewals_prolong_it_and_are_answered(hold: Callable[[float], Holding], tmp_path: Path) -> None:
    held = hold(1.0)
    for _ in range(10):
        time.sleep(0.25)
        renewed_at = time.monotonic()
        assert lease_keeper.renew(held.token)
    content = lease.read(tmp_path / "machine.lease")
    assert content is not None and content["renewed_at"] >= renewed_at and content["ttl_s"] == 1.0
    assert held.ended(10) and 1.0 <= held.ended_at - renewed_at < 2.0
    assert not lease_keeper.renew(held.token, 0.1)


def test_another_token_renews_nothing(hold: Callable[[float], Holding]) -> None:
    began = time.monotonic()
    held = hold(1.0)
    while not held.ended(0.1):
        assert not lease_keeper.renew(uuid4().hex)
    assert held.ended_at - began < 2.0


def test_nonsense_renews_nothing_and_does_no_harm(hold: Callable[[float], Holding]) -> None:
    held = hold(1.5)
    address = f"\0ddtree-bench-lease-{held.token}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        for request in (b"", b"renew", b"1e300", b"nan", b"\xff" * 1000):
            channel.sendto(request, address)
    assert lease_keeper.renew(held.token)
    renewed_at = time.monotonic()
    assert held.ended(10) and held.ended_at - renewed_at < 2.5


def test_a_lease_file_that_somebody_removed_or_replaced_ends_it_at_once(
    hold: Callable[[float], Holding], tmp_path: Path
) -> None:
    held = hold(60)
    (tmp_path / "machine.lease").unlink()
    assert held.ended(2) and "machine.lease was removed" in held.why
    other = hold(60)
    (tmp_path / "new").write_text("")
    (tmp_path / "new").replace(tmp_path / "machine.lease")
    assert other.ended(2) and "machine.lease was removed" in other.why


def test_it_signs_over_what_somebody_without_the_lock_wrote(hold: Callable[[float], Holding], tmp_path: Path) -> None:
    held = hold(30)
    (tmp_path / "machine.lease").write_text('{"user": "mallory", "token": "t"}')
    assert lease_keeper.renew(held.token)
    assert "ann" in lease.describe_holder(tmp_path / "machine.lease")


def test_a_signal_ends_it_at_once(hold: Callable[[float], Holding]) -> None:
    held = hold(60)
    held._signal.send(b"x")
    assert held.ended(2) and held.why == "it was asked to end"


def test_a_stopped_keeper_renews_nothing_and_ends_when_it_goes_on(
    alone: Callable[[float], tuple[subprocess.Popen[str], str]],
) -> None:
    process, token = alone(1.0)
    process.send_signal(signal.SIGSTOP)
    assert not lease_keeper.renew(token, 0.2)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    assert process.wait(1) == 0


def test_a_renewal_that_waited_for_a_stopped_keeper_counts_from_when_it_was_asked(
    alone: Callable[[float], tuple[subprocess.Popen[str], str]],
) -> None:
    process, token = alone(3.0)
    process.send_signal(signal.SIGSTOP)
    asked = time.monotonic()
    assert not lease_keeper.renew(token, 0.1)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    assert process.wait(10) == 0
    assert 3.0 <= time.monotonic() - asked < 4.0


def test_a_lock_that_somebody_else_has_is_refused_with_the_owner_in_words(tmp_path: Path) -> None:
    with lease.acquire("machine", tmp_path, run="local run"):
        began = time.monotonic()
        result = run_keeper(tmp_path / "machine.lease")
    assert result.returncode == lease_keeper.BUSY and time.monotonic() - began < 5
    assert "is held by" in result.stdout and "run local run" in result.stdout
    assert lease.read(tmp_path / "machine.lease")["run"] == "local run"  # type: ignore[index]


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of systemctl, which works on a machine with systemd alone."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def write(script: str) -> None:
        path = tmp_path / "bin/systemctl"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


FAIL_TWICE = 'echo >>"$0.asked"; test "$(wc -l <"$0.asked")" -gt 2 || exit 1'


def test_a_look_that_fails_does_not_show_that_nothing_is_there(
    systemctl: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, _signal = socket.socketpair()
    asked = tmp_path / "bin/systemctl.asked"
    systemctl(FAIL_TWICE)
    lease_keeper.outlast("x.service", "system")
    assert len(asked.read_text()) == 3
    asked.unlink()
    lease_keeper.wait_for_leftovers("x.service", "system", tmp_path / "machine.lease", signals)
    assert len(asked.read_text()) == 3

    systemctl("exit 1")
    monkeypatch.setattr(lease_keeper, "LEFTOVERS_S", 0.3)
    monkeypatch.setattr(lease_keeper, "END_S", 0.3)
    with pytest.raises(lease.TargetBusy, match=r"units unknown \(systemctl --system .* did not end within"):
        lease_keeper.wait_for_leftovers("x.service", "system", tmp_path / "machine.lease", signals)
    with pytest.raises(TargetError, match=r"units unknown \(systemctl --user .*, bound to x.service, did not end"):
        lease_keeper.outlast("x.service", "user")


def test_processes_of_an_earlier_lease_are_waited_for_whatever_started_them(
    systemctl: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl("exit 0")
    signals, _signal = socket.socketpair()
    path = tmp_path / "machine.lease"
    left = subprocess.Popen(["sleep", "60"], env={**os.environ, lease.LEASE_MARK: str(path)})
    try:
        monkeypatch.setattr(lease_keeper, "LEFTOVERS_S", 0.3)
        with pytest.raises(lease.TargetBusy, match=rf"process {left.pid} \(sleep 60\) of an earlier lease"):
            lease_keeper.wait_for_leftovers("x.service", "system", path, signals)
        lease_keeper.wait_for_leftovers("x.service", "system", tmp_path / "other.lease", signals)
    finally:
        left.kill()
        left.wait()
    lease_keeper.wait_for_leftovers("x.service", "system", path, signals)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_renews_nothing(hold: Callable[[float], Holding]) -> None:
    held = hold(30)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(lease_keeper.renew(held.token, 0.3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lease_keeper.renew(held.token)


@pytest.mark.parametrize("abstract", [False, True])
def test_what_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"ddtree-bench-test-{uuid4().hex}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        notify(READY="1", STATUS="held by ann\nMAINPID=1")
        assert manager.recv(4096) == b"READY=1\nSTATUS=held by ann MAINPID=1"


def test_nobody_is_told_where_nobody_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY="1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify(READY="1")


def test_it_ends_with_the_process_that_held_it(
    alone: Callable[[float], tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    process, token = alone(60)
    assert lease_keeper.renew(token)
    process.kill()
    assert eventually(lambda: not lease.is_held(tmp_path / "machine.lease"), 5)
    assert not lease_keeper.renew(token)
