"""Hold the lease of a host for a measuring process elsewhere: the dead man's switch of its units.

    python -m ddtree_bench.targets.lease_keeper --lease FILE --token TOKEN --ttl 60 --owner JSON --unit NAME --scope S

Runs as a unit of type notify. It locks the same file as runs on the host itself, signs it for the owner, says that it
is ready, and holds it until the owner has not renewed it for the time to live, or until SIGTERM: exit status 0. When
somebody else has the lock it says who, and ends at once: exit status 75. Servers are bound to its unit (BindsTo=,
After=), so whatever ends the keeper has systemd stop them.

The lock outlasts them: the keeper announces its end (STOPPING=1), at which systemd stops what is bound to it, and ends
when that is gone. Only a killed keeper cannot, so each one waits first for what such a one has left to be gone.

The keeper alone writes the file that it has locked. A renewal is asked of it, through a socket named after the token,
and answered: `renew` returns True only while the switch is armed. The token is a name, and no secret: the kernel says
who asks, and nobody is answered but the keeper's own user and root. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddtree_bench.targets import lease, proc
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.lease import LEASE_MARK, Owner, TargetBusy
from ddtree_bench.targets.service_manager import loaded_units, notify

BUSY = 75
"""Exit status when somebody else has the lease: EX_TEMPFAIL of sysexits.h."""

FAILED = 1
TICK_S = 0.5
LOOK_EVERY_S = 0.2
ANSWER_S = 2.0

LEFTOVERS_S = 20.0
"""How long what a killed keeper has left may take to be gone; with a last look, that is less than a keeper has to be
ready."""

END_S = 300.0
"""How long bound units may take to be gone; systemd kills those that take longer than their own stop timeout."""

EXTEND_S = 20.0
"""How long systemd is to wait for a keeper that outlasts them, from each time that it says so."""

CREDENTIALS = struct.Struct("iII")
"""Process, user and group of who sent a message (SCM_CREDENTIALS of unix(7))."""


class Keeper:
    """A signed lease, and the socket at which it is renewed."""

    def __init__(self, path: Path, descriptor: int, owner: Owner, token: str, ttl_s: float) -> None:
        self._path = path
        self._descriptor = descriptor
        self._owner = owner
        self._token = token
        self._ttl_s = ttl_s
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._requests.bind(_address(token))
        self.sign(time.monotonic())

    def sign(self, renewed_at: float) -> None:
        """Write into the file whose lease it is and that it was renewed at a moment of CLOCK_MONOTONIC."""
        self._renewed_at = renewed_at
        lease.sign(self._descriptor, self._owner, self._token, self._ttl_s, renewed_at)

    def hold(self, signals: socket.socket) -> str:
        """Take renewals until there is a reason to end, and none afterwards; returns the reason.

        `signals` is readable once a signal has come.
        """
        with self._requests:
            while True:
                left = self._renewed_at + self._ttl_s - time.monotonic()
                if left <= 0:
                    return f"the lease has not been renewed for {self._ttl_s:g} s"
                if not lease.is_same_file(self._descriptor, self._path):
                    return f"the lease file {self._path} was removed"
                notify(WATCHDOG="1")
                readable, _, _ = select.select([self._requests, signals], [], [], min(TICK_S, left))
                if signals in readable:
                    return "it was asked to end"
                if self._requests in readable:
                    self._answer()

    def _answer(self) -> None:
        request, ancillary, _, asker = self._requests.recvmsg(64, socket.CMSG_SPACE(CREDENTIALS.size))
        _, user, _ = CREDENTIALS.unpack(ancillary[0][2])
        if user not in (0, os.geteuid()):
            return
        # Nonsense is no reason to end, nor is an asker that is gone.
        with suppress(ValueError, OSError):
            asked_at = float(request)
            # Not when it was read: the request may have waited for a keeper that was stopped.
            self.sign(max(self._renewed_at, min(asked_at, time.monotonic())))
            if asker:
                self._requests.sendto(b"renewed", asker)


def renew(token: str, timeout_s: float = ANSWER_S) -> bool:
    """Renew the lease of a token; False when no keeper of this machine holds it, or it does not answer in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        # An empty name has the kernel give the socket one, to which the answer goes.
        channel.bind("")
        channel.settimeout(timeout_s)
        try:
            channel.sendto(repr(time.monotonic()).encode(), _address(token))
            return channel.recv(64) == b"renewed"
        except OSError:
            return False


def wait_for_leftovers(unit: str, scope: str, path: Path, signals: socket.socket) -> None:
    """Wait, as the keeper `unit`, until what keepers that are gone have left is gone too; returns early on a signal.

    Raises TargetBusy, which names them, when they still run after LEFTOVERS_S.
    """
    deadline = time.monotonic() + LEFTOVERS_S
    while left := _seen(lambda: leftovers(unit, scope, path)):
        if time.monotonic() > deadline:
            raise TargetBusy(f"{', '.join(left)} of an earlier lease did not end within {LEFTOVERS_S:.0f} s; stop them")
        notify(STATUS=f"waiting for the end of {', '.join(left)}")
        if select.select([signals], [], [], LOOK_EVERY_S)[0]:
            return


def leftovers(unit: str, scope: str, path: Path) -> list[str]:
    """What still runs although no keeper but `unit`, which is not ready yet, is there for it, in words.

    Units of the scope; where there are none, processes that were started under the lease at `path`, whatever started
    them: of all users where this is root, else of its own.
    """
    units = loaded_units(scope)
    alive = {other.name for other in units if other.alive} - {unit}
    bound = [other.name for other in units if other.alive and other.binds_to and alive.isdisjoint(other.binds_to)]
    return bound or proc.marked(LEASE_MARK, str(path))


def outlast(unit: str, scope: str) -> None:
    """Have systemd stop the units that are bound to this one, and return when they are gone.

    Raises TargetError, which names them, when they still run after END_S.
    """

    def bound() -> list[str]:
        notify(EXTEND_TIMEOUT_USEC=_microseconds(EXTEND_S))
        return [other.name for other in loaded_units(scope) if other.alive and unit in other.binds_to]

    deadline = time.monotonic() + END_S
    while left := _seen(bound):
        if time.monotonic() > deadline:
            raise TargetError(f"{', '.join(left)}, bound to {unit}, did not end within {END_S:.0f} s")
        time.sleep(LOOK_EVERY_S)


def main(arguments: list[str] | None = None) -> int:
    """Hold the lease; returns 0 after any end that was seen through, 75 when it is somebody else's, 1 on errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lease", type=Path, required=True, help="lease file, locked for as long as the keeper lives")
    parser.add_argument("--token", required=True, help="the owner's token, by which the lease is renewed")
    parser.add_argument("--ttl", type=float, required=True, help="seconds without renewal after which the keeper ends")
    parser.add_argument("--owner", type=json.loads, required=True, help="who the owner is, JSON")
    parser.add_argument("--unit", required=True, help="the keeper's own unit, to which servers are bound")
    parser.add_argument("--scope", choices=("system", "user"), required=True, help="whose systemd runs it")
    options = parser.parse_args(arguments)

    signals = _signals()
    owner = Owner.read(options.owner)
    try:
        keeper = Keeper(options.lease, lease.take(options.lease), owner, options.token, options.ttl)
        wait_for_leftovers(options.unit, options.scope, options.lease, signals)
        keeper.sign(time.monotonic())
        # A keeper that hangs renews nothing either: systemd kills it after the same time.
        notify(READY="1", STATUS=f"held by {owner}", WATCHDOG_USEC=_microseconds(options.ttl))
        why = keeper.hold(signals)
        _say(f"{why}: ending what is bound to this lease")
        notify(STOPPING="1", STATUS=why)
        outlast(options.unit, options.scope)
    except TargetError as error:
        _say(str(error))
        return BUSY if isinstance(error, TargetBusy) else FAILED
    return 0


def _seen(look: Callable[[], list[str]]) -> list[str]:
    """What a look shows. One that fails, as on a busy host, does not show that nothing is there."""
    try:
        return look()
    except TargetError as error:
        return [f"units unknown ({error})"]


def _address(token: str) -> str:
    # Abstract: it is gone with the keeper, and needs no folder.
    return f"\0ddtree-bench-lease-{token}"


def _microseconds(seconds: float) -> str:
    return str(round(seconds * 1e6))


def _signals() -> socket.socket:
    """A socket that is readable once SIGTERM or SIGINT has come."""
    received, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.detach())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return received


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
