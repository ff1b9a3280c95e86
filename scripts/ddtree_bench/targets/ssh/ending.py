"""Who ended a unit that is bound to the lease, and why, as far as its host can tell."""

from __future__ import annotations

import signal
from collections.abc import Callable

from ddtree_bench.targets.launcher import Reason, ServerState
from ddtree_bench.targets.ssh.host import RemoteHost
from ddtree_bench.targets.unit_state import UnitState


def requested(shown: UnitState) -> ServerState:
    """The state of a server that was stopped by its launcher."""
    return _ended(shown, "requested", None)


def ending(host: RemoteHost, keeper: str, shown: UnitState, why: Callable[[UnitState], str]) -> ServerState:
    """The state of a unit bound to that of a lease's `keeper` which was not stopped from here.

    `why` says why it ended by itself, if it did. Raises LinkLost when the host is not reached.
    """
    gone = shown.load_state == "not-found"
    if gone and host.look().boot_id != host.login.boot_id:
        return _ended(shown, "rebooted", "is gone: the host was started again")
    # A keeper that is asked to end outlasts what is bound to it.
    if (lease := host.systemd.state(keeper)).active_state != "active":
        # Whoever has taken the lease since may have removed the units too.
        return _ended(shown, "lease", f"was stopped with the lease on the host: {_why_released(host, lease)}")
    if gone:
        return _ended(shown, "removed", "is gone: its unit was removed on the host")
    if shown.active_state == "inactive" or shown.stop_timeout:
        # One that ends by itself stays as failed, or as active without a process.
        return _ended(shown, "stopped", "was stopped on the host (systemctl stop)")
    return _ended(shown, "exited", why(shown))


def _why_released(host: RemoteHost, keeper: UnitState) -> str:
    """What the keeper of the lease said at its end; one that was killed has said nothing."""
    text, _ = host.systemd.journal(keeper.name, None)
    said = text.strip().splitlines()[-1:]
    return said[0] if said and keeper.result == "success" else f"its keeper {keeper}"


def _ended(shown: UnitState, who: Reason, why: str | None) -> ServerState:
    number = signal.Signals.__members__.get(shown.signal or "")
    return ServerState(alive=False, exit_code=shown.exit_code, signal=number, reason=who, why=why)
