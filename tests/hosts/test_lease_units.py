"""The lease keeper as a unit of a real systemd: whatever ends it, what is bound to it ends too, and then the lock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import pytest
from commands import LabFailed
from lab import Lab
from nspawn import Host

from ddtree_bench.targets import host_tools
from ddtree_bench.targets.lease import LEASE_MARK
from ddtree_bench.targets.lease_keeper import BUSY
from ddtree_bench.targets.ssh.unit import Unit, render
from ddtree_bench.targets.unit_state import SHOW, UnitState, parse_show

ARCHIVE = "/opt/ddtree_bench.zip"
PYTHON = "/usr/bin/python3"
USER = "ann"
OWNER = {"user": "ann", "host": "laptop", "pid": 7, "run": "r1", "since": "then", "workflow": "/home/ann/w"}
GRACE_S = 2.0

STUBBORN = "trap '' TERM; while :; do sleep 0.1; done"
"""A server that has to be killed after its grace."""

BUSY_SYSTEMCTL = """\
#!/bin/sh
test -e /run/busy && exit 1
exec /usr/bin/systemctl "$@"
"""

WATCH = """
import os, sys, time
from pathlib import Path
from ddtree_bench.targets import lease
path, server = Path(sys.argv[1]), Path("/proc", sys.argv[2])
began, free_too_early = time.monotonic(), 0
while lease.is_held(path) or server.exists():
    # The lock first: a server does not come back.
    free_too_early += not lease.is_held(path) and server.exists()
    if time.monotonic() - began > 30:
        sys.exit("the server or the lock is still there")
    time.sleep(0.01)
print(time.monotonic() - began, free_too_early)
"""
"""Wait until a server and the lock are gone; prints how long that took and how often the lock was free before."""

ACQUIRE = """
import sys
from pathlib import Path
from ddtree_bench.targets import lease
try:
    lease.acquire("machine", Path(sys.argv[1]).parent, run="local").release()
except lease.TargetBusy as busy:
    sys.exit(str(busy))
"""

HOLD = """
import subprocess, sys
from pathlib import Path
from ddtree_bench.targets import lease
with lease.acquire("machine", Path(sys.argv[1]).parent, run="local"):
    subprocess.run(sys.argv[2:])
"""
"""A local run on the host, and what is done meanwhile."""


@dataclass
class Scope:
    """Units of one scope of a host, and the lease in a folder of their own."""

    host: Host
    name: str
    lease: str = field(default_factory=lambda: f"/var/tmp/leases-{uuid4().hex[:8]}/machine.lease")

    def run(self, *argv: str, stdin: str = "") -> str:
        """Run a command as who owns the units, and return what it printed."""
        if self.name == "system":
            return str(self.host.exec(*argv, stdin=stdin))
        return str(self.host.exec("env", f"XDG_RUNTIME_DIR={self.runtime}", *argv, stdin=stdin, user=USER))

    @property
    def runtime(self) -> str:
        """Where the service manager of this scope has its runtime files."""
        return "/run" if self.name == "system" else f"/run/user/{self.host.exec('id', '-u', USER).strip()}"

    def program(self, source: str, *arguments: str) -> str:
        """Run a program against the package on the host."""
        return self.run("env", f"PYTHONPATH={ARCHIVE}", PYTHON, "-c", source, *arguments)

    def systemctl(self, *arguments: str) -> str:
        return self.run("systemctl", f"--{self.name}", "--no-pager", *arguments)

    def add(self, unit: Unit) -> Unit:
        """Install a unit."""
        folder = f"{self.runtime}/systemd/{self.name}"
        self.run("mkdir", "-p", folder)
        self.run("tee", f"{folder}/{unit.name}", stdin=render(unit))
        self.systemctl("daemon-reload")
        return unit

    def state(self, unit: Unit) -> UnitState:
        return parse_show(self.systemctl(*SHOW, unit.name))

    def start(self, unit: Unit) -> UnitState:
        """Start a unit, which may fail."""
        self.run("sh", "-c", f"systemctl --{self.name} start {unit.name} || true")
        return self.state(unit)

    def keeper(self, ttl_s: float, stop_grace_s: float = 10.0, login: str | None = None, path: str = "") -> Unit:
        """A keeper that is installed, run by `login`; its token is in its name. `path` is where it finds systemctl."""
        token = uuid4().hex[:12]
        name = f"ddtree-bench-lease-{token}.service"
        module = "ddtree_bench.targets.lease_keeper"
        options = ["--lease", self.lease, "--token", token, "--ttl", str(ttl_s), "--unit", name, "--scope", self.name]
        argv, env = host_tools.command(PYTHON, ARCHIVE, module, *options, "--owner", json.dumps(OWNER))
        env |= {"PATH": path} if path else {}
        unit = Unit(name, "lease", tuple(argv), env, kind="notify", start_timeout_s=30, stop_grace_s=stop_grace_s)
        return self.add(replace(unit, user=login))

    def server(self, keeper: Unit) -> Unit:
        """A server that is bound to a keeper, ignores SIGTERM, and is installed."""
        name = f"ddtree-bench-server-{uuid4().hex[:12]}.service"
        argv = ("/bin/sh", "-c", STUBBORN)
        mark = {LEASE_MARK: self.lease}
        return self.add(Unit(name, "server", argv, mark, binds_to=keeper.name, stop_grace_s=GRACE_S))

    def renew(self, keeper: Unit) -> bool:
        """Renew a lease as a measuring process does."""
        return bool(self.ask(op="renew", lease=self.lease, token=token_of(keeper))["renewed"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """Ask the host agent one thing."""
        argv, env = host_tools.command(PYTHON, ARCHIVE, "ddtree_bench.targets.host_agent")
        variables = [f"{name}={value}" for name, value in env.items()]
        return dict(json.loads(self.run("env", *variables, *argv, stdin=json.dumps(request) + "\n")))

    def log(self, unit: Unit) -> str:
        """What a unit wrote."""
        names = "_SYSTEMD_UNIT" if self.name == "system" else "_SYSTEMD_USER_UNIT"
        return str(self.host.exec("journalctl", "-o", "cat", f"{names}={unit.name}"))

    def started(self, ttl_s: float, stop_grace_s: float = 10.0, login: str | None = None) -> tuple[Unit, Unit, int]:
        """A keeper and a server that run, and the process of the server."""
        keeper = self.keeper(ttl_s, stop_grace_s, login)
        server = self.server(keeper)
        assert self.start(keeper).alive
        main_pid = self.start(server).main_pid
        assert main_pid is not None
        return keeper, server, main_pid

    def watch(self, pid: int) -> float:
        """Wait until a server and the lock are gone; returns seconds. The lock must not be free before."""
        seconds, free_too_early = self.program(WATCH, self.lease, str(pid)).split()
        assert int(free_too_early) == 0
        return float(seconds)


@pytest.fixture(scope="module")
def host(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host with the package's archive and a user who lingers."""
    archive = host_tools.archive(tmp_path_factory.mktemp("tools"))
    host = lab.start("leases", bind_ro={ARCHIVE: archive})
    host.add_user(USER, lingering=True)
    yield host
    lab.remove(host)


@pytest.fixture(params=["system", "user"])
def scope(host: Host, request: pytest.FixtureRequest) -> Iterator[Scope]:
    scope = Scope(host, request.param)
    yield scope
    scope.systemctl("stop", "ddtree-bench-*.service")


def token_of(keeper: Unit) -> str:
    return keeper.name.removeprefix("ddtree-bench-lease-").removesuffix(".service")


def test_a_keeper_holds_the_lease_of_the_host(scope: Scope) -> None:
    keeper = scope.keeper(60)
    state = scope.start(keeper)
    assert state.alive and state.was_active
    words = "ann (host laptop, process 7, run r1, workflow /home/ann/w) since then"
    holder = scope.ask(op="holder", lease=scope.lease)
    assert holder == {"held": True, "owner": OWNER, "words": words}
    assert scope.renew(keeper)

    second = scope.keeper(60)
    state = scope.start(second)
    assert state.exit_code == BUSY and not state.alive
    assert f"is held by {words}" in scope.log(second)
    with pytest.raises(LabFailed, match=r"is held by ann \(host laptop"):
        scope.program(ACQUIRE, scope.lease)

    scope.systemctl("stop", keeper.name)
    state = scope.state(keeper)
    assert state.exit_code in (0, None) and state.result == "success"
    scope.program(ACQUIRE, scope.lease)
    assert scope.start(second).alive
    assert not scope.renew(keeper)


def test_a_local_run_on_the_host_keeps_a_keeper_out(scope: Scope) -> None:
    keeper = scope.keeper(60)
    scope.program(HOLD, scope.lease, "systemctl", f"--{scope.name}", "start", keeper.name)
    assert scope.state(keeper).exit_code == BUSY and "run local" in scope.log(keeper)
    assert scope.start(keeper).alive


def test_renewals_keep_it_for_longer_than_its_time(scope: Scope) -> None:
    keeper, server, _ = scope.started(2)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        assert scope.renew(keeper)
        time.sleep(0.3)
    assert scope.state(keeper).alive and scope.state(server).alive


def test_nobody_renews_it(scope: Scope) -> None:
    """The keeper has less time to stop than the server takes, and outlasts it all the same."""
    began = time.monotonic()
    keeper, server, pid = scope.started(2, stop_grace_s=1)
    scope.watch(pid)
    assert 2 + GRACE_S <= time.monotonic() - began < 2 + 1 + GRACE_S + 3
    assert "has not been renewed for 2 s" in scope.log(keeper)
    state = scope.state(keeper)
    assert not state.alive and state.result == "success"
    assert not scope.state(server).alive


def test_a_keeper_of_a_login_without_rights_ends_its_server_too(host: Host) -> None:
    scope = Scope(host, "system")
    began = time.monotonic()
    keeper, server, pid = scope.started(2, login=USER)
    scope.watch(pid)
    assert 2 + GRACE_S <= time.monotonic() - began < 2 + 1 + GRACE_S + 3
    assert not scope.state(keeper).alive and not scope.state(server).alive


def test_it_is_asked_to_end(scope: Scope) -> None:
    keeper, server, pid = scope.started(60)
    scope.systemctl("kill", "--kill-whom=main", "--signal=TERM", keeper.name)
    assert GRACE_S - 1 < scope.watch(pid) < GRACE_S + 3
    keeper, server, pid = scope.started(60)
    scope.systemctl("stop", "--no-block", keeper.name)
    assert GRACE_S - 1 < scope.watch(pid) < GRACE_S + 3
    assert not scope.state(server).alive


def test_it_is_killed(scope: Scope) -> None:
    """The lock is free at once, so the next keeper is there, but not ready before the server is gone."""
    keeper, server, pid = scope.started(60)
    following = scope.keeper(60)
    began = time.monotonic()
    scope.systemctl("kill", "--kill-whom=main", "--signal=KILL", keeper.name)
    state = scope.start(following)
    assert GRACE_S - 1 < time.monotonic() - began < GRACE_S + 3
    assert state.alive and not scope.state(server).alive
    with pytest.raises(LabFailed):
        scope.run("test", "-d", f"/proc/{pid}")


def test_what_a_users_killed_keeper_has_left_is_waited_for_by_root(host: Host) -> None:
    """Another service manager, which root's does not know."""
    users = Scope(host, "user")
    keeper, _, pid = users.started(60)
    following = Scope(host, "system", users.lease)
    waiting = following.keeper(60)
    users.systemctl("kill", "--kill-whom=main", "--signal=KILL", keeper.name)
    assert following.start(waiting).alive
    with pytest.raises(LabFailed):
        host.exec("test", "-d", f"/proc/{pid}")
    following.systemctl("stop", waiting.name)


def test_the_lock_is_not_let_go_of_while_systemd_does_not_answer(host: Host) -> None:
    host.write_file("/opt/busy/systemctl", BUSY_SYSTEMCTL, mode=0o755)
    scope = Scope(host, "system")
    keeper = scope.keeper(60, path="/opt/busy:/usr/bin:/bin")
    server = scope.server(keeper)
    scope.start(keeper)
    pid = scope.start(server).main_pid
    host.exec("touch", "/run/busy")
    scope.systemctl("stop", "--no-block", keeper.name)
    time.sleep(GRACE_S + 1)
    assert not scope.state(server).alive and scope.state(keeper).alive
    host.exec("rm", "/run/busy")
    scope.watch(pid or 0)


def test_it_is_stopped_by_a_signal_and_hangs(scope: Scope) -> None:
    keeper, server, pid = scope.started(2.5)
    scope.systemctl("kill", "--kill-whom=main", "--signal=STOP", keeper.name)
    assert not scope.renew(keeper)
    began = time.monotonic()
    scope.program(WATCH, scope.lease, str(pid))
    assert time.monotonic() - began < 2.5 + GRACE_S + 3
    assert not scope.state(keeper).alive and not scope.state(server).alive
