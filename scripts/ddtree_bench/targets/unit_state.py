"""What systemd knows of a unit, read from `systemctl show`. Standard library only: programs on a target use it too."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

PROPERTIES = (
    "Id",
    "Description",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "InactiveExitTimestampMonotonic",
    "ActiveEnterTimestampMonotonic",
    "InvocationID",
    "User",
    "BindsTo",
)
SHOW = ("show", f"--property={','.join(PROPERTIES)}", "--")
"""Arguments of systemctl before the names of units: what `parse_show` reads. Other properties may hold line breaks."""

EXITED, KILLED, DUMPED = "1", "2", "3"
"""Values of ExecMainCode: how the main process ended (CLD_EXITED and so on of waitid(2))."""


@dataclass(frozen=True)
class UnitState:
    """What systemd knows of a unit.

    Attributes
    ----------
    exit_code, signal : int or None, str or None
        How the main process ended, by exit status or by a signal's name such as SIGKILL; neither while it runs.
    started_us : int
        When it was started last, CLOCK_MONOTONIC of the host in microseconds. 0 for a unit that was never started, or
        has ended and is forgotten.
    was_active : bool
        Whether the unit's program was ever executed (Type=exec), or had said that it is ready (Type=notify).
    invocation_id : str
        Names this start of the unit; empty when `started_us` is 0.
    user : str or None
        Who runs it, where that is not whom the service manager belongs to.
    binds_to : tuple of str
        The units that it does not outlive.
    """

    name: str
    description: str
    load_state: str
    active_state: str
    sub_state: str
    result: str
    main_pid: int | None
    exit_code: int | None
    signal: str | None
    started_us: int
    was_active: bool
    invocation_id: str
    user: str | None = None
    binds_to: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether the unit has a process, be it on its way up or down."""
        return self.active_state not in ("inactive", "failed") and self.sub_state != "exited"

    @property
    def stop_timeout(self) -> bool:
        """Whether it was asked to stop, did not within its time, and was killed: it has not ended by itself."""
        return self.result == "timeout" and self.was_active

    @property
    def oom(self) -> bool:
        """Whether the kernel killed it for want of memory. Known where the host has cgroups of version 2."""
        return self.result == "oom-kill"

    def __str__(self) -> str:
        if self.load_state == "not-found":
            return f"{self.name} is not there"
        said = [self.active_state, self.sub_state]
        if self.result != "success":
            said.append(f"result {self.result}")
        if self.exit_code is not None:
            said.append(f"exit status {self.exit_code}")
        if self.signal is not None:
            said.append(self.signal)
        return f"{self.name} is {', '.join(said)}"


def parse_show(text: str) -> UnitState:
    """The state of one unit from the lines NAME=VALUE of `systemctl show`; raises ValueError when they are none."""
    shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if "Id" not in shown or "ActiveState" not in shown:
        raise ValueError(f"systemctl show printed no state of a unit: {text.strip()[:200]!r}")
    main_pid, code = int(shown.get("MainPID", "0")), shown.get("ExecMainCode")
    return UnitState(
        name=shown["Id"],
        description=shown.get("Description", ""),
        load_state=shown.get("LoadState", ""),
        active_state=shown["ActiveState"],
        sub_state=shown.get("SubState", ""),
        result=shown.get("Result", "success"),
        main_pid=main_pid or None,
        exit_code=int(shown["ExecMainStatus"]) if code == EXITED else None,
        signal=_signal_name(shown) if code in (KILLED, DUMPED) else None,
        started_us=int(shown.get("InactiveExitTimestampMonotonic", "0")),
        was_active=shown.get("ActiveEnterTimestampMonotonic", "0") != "0",
        invocation_id=shown.get("InvocationID", ""),
        user=shown.get("User") or None,
        binds_to=tuple(shown.get("BindsTo", "").split()),
    )


def parse_shown(text: str) -> list[UnitState]:
    """The states of several units, of which `systemctl show` prints one after another with blank lines between."""
    return [parse_show(block) for block in text.split("\n\n") if block.strip()]


def _signal_name(shown: Mapping[str, str]) -> str:
    number = int(shown["ExecMainStatus"])
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
