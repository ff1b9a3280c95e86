"""The lease on a host: held there by the lease keeper's unit, renewed from here by the pulse."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType

from ddtree_bench.targets import lease
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.lease import Owner, TargetBusy
from ddtree_bench.targets.lease_keeper import BUSY
from ddtree_bench.targets.service_manager import OURS
from ddtree_bench.targets.ssh.host import RemoteHost
from ddtree_bench.targets.ssh.pulse import Pulse
from ddtree_bench.targets.ssh.unit import Unit
from ddtree_bench.targets.unit_state import UnitState

KEEPER = "ddtree_bench.targets.lease_keeper"
KEEPER_UNITS = "ddtree-bench-lease-"

START_S = 30.0
STOP_PATIENCE_S = 10.0
POLL_S = 2.0


class HeldLease:
    """A lease that is held until `release`, or until the block ends. `path` is its file on the host."""

    def __init__(self, host: RemoteHost, unit: str, path: str, pulse: Pulse) -> None:
        self._host = host
        self.unit = unit
        self.path = path
        self.pulse = pulse
        self.released = False

    def release(self) -> None:
        """Renew it no more and end its keeper, and with it whatever is bound to it."""
        if self.released:
            return
        self.released = True
        self.pulse.stop()
        _end_keeper(self._host, self.unit)

    def __enter__(self) -> HeldLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take(host: RemoteHost, name: str, *, run: str, wait_s: float, report: Callable[[str], None]) -> HeldLease:
    """Have a keeper on the host take the lease `name`, waiting up to `wait_s` seconds and reporting who holds it.

    Raises TargetBusy, which names the owner, when it is still held then, and TargetError when no keeper starts.
    """
    place, token = host.place, uuid.uuid4().hex
    path = place.lease_path(name)
    unit = _keeper(host, path, token, Owner.this_process(run))
    pulse = Pulse(
        host.agent,
        path,
        token,
        scope=place.scope,
        ttl_s=place.lease_ttl_s,
        reconnect_s=place.reconnect_s,
        report=lambda line: report(f"{place.name}: {line}"),
    )
    host.systemd.install(unit)
    try:
        _start_keeper(host, unit, path, wait_s, report)
        host.systemd.remove_ended(OURS, host.unit_user)
        host.agent.open()
        pulse.start()
    except BaseException:
        _end_keeper(host, unit.name)
        raise
    return HeldLease(host, unit.name, path, pulse)


def keeper_words(path: str, owner: Owner) -> str:
    """What the unit of an owner's keeper of a lease is described as."""
    return f"lease {path} of ddtree-bench, for {owner}"


def _start_keeper(host: RemoteHost, unit: Unit, path: str, wait_s: float, report: Callable[[str], None]) -> None:
    """Start a keeper until it holds the lease. Raises TargetBusy when that was never so within `wait_s` seconds."""
    name = host.place.name
    deadline, next_report = time.monotonic() + wait_s, 0.0
    while not (state := host.systemd.start(unit.name, START_S)).alive:
        _require_busy(host, state)
        held = f"the lease {path} is held by {host.ask('holder', lease=path)['words']}"
        now = time.monotonic()
        if now >= deadline:
            raise TargetBusy(f"{name}: {held}; wait for that run to end, or raise targets.{name}.lease_wait_s")
        if now >= next_report:
            report(f"{name}: waiting, for {held}")
            next_report = now + lease.REPORT_EVERY_S
        time.sleep(min(POLL_S, deadline - now))


def _require_busy(host: RemoteHost, keeper: UnitState) -> None:
    """Raise TargetError, with what it wrote, when a keeper ended for another reason than a lease that is held."""
    if keeper.exit_code == BUSY:
        return
    text, _ = host.systemd.journal(keeper.name, None, ended=True)
    name, folder = host.place.name, host.place.lease_directory
    raise TargetError(
        f"targets.{name}.lease_dir: the keeper of the lease did not start: {keeper}; {text.strip()[-500:]}; see that "
        f"{folder} can be written on the host and has room, and run again"
    )


def _end_keeper(host: RemoteHost, unit: str) -> None:
    # A host that cannot be reached ends the keeper by itself.
    with suppress(TargetError), host.connection.patience(STOP_PATIENCE_S):
        host.systemd.stop(unit, START_S)
        host.systemd.remove(unit)


def _keeper(host: RemoteHost, path: str, token: str, owner: Owner) -> Unit:
    place, name = host.place, f"{KEEPER_UNITS}{token[:12]}.service"
    options = ["--lease", path, "--token", token, "--ttl", f"{place.lease_ttl_s:g}", "--unit", name]
    options += ["--scope", place.scope, "--owner", json.dumps(asdict(owner))]
    argv, env = host.module(KEEPER, *options)
    return Unit(
        name=name,
        description=keeper_words(path, owner),
        argv=tuple(argv),
        environment=env,
        user=host.unit_user,
        stop_grace_s=START_S,
        kind="notify",
        start_timeout_s=START_S,
    )
