"""The pulse of a host: once a second a round trip, the renewal of the lease, and a look at the server's unit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from ddtree_bench.targets.launcher import LinkRecord, TargetError
from ddtree_bench.targets.ssh.agent import ANSWER_S, HostAgent
from ddtree_bench.targets.ssh.failures import LinkLost
from ddtree_bench.targets.unit_state import UnitState, parse_show

EVERY_S = 1.0
RENEWALS = 6
"""Renewals of the lease in its time to live."""

STALL_S = 2.0
"""An answer that is on its way for longer has stalled what was measured through the link as well."""

PING_S = 6.0
"""How long the answer to a ping may take before the agent is started anew."""

CLOCK_S = 180.0
"""How long a ping tells of the difference of two clocks: they drift apart, by a hundredth of a second in that time."""

FRESH_S = 0.5
"""How old what is known of a unit may be before the host is asked again."""

LOOK_S = 0.4
"""How long whoever asks for a unit's state waits for what is newer than that."""

OLD_S = 3.0
"""What is known of a unit for longer than this is not what it does now."""


class Pulse:
    """A thread that keeps the lease, and watches the link and one unit, until `stop`."""

    def __init__(
        self,
        agent: HostAgent,
        lease_path: str,
        token: str,
        *,
        scope: Literal["system", "user"],
        ttl_s: float,
        reconnect_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._lease_path = lease_path
        self._token = token
        self._scope = scope
        self._renew_every_s = ttl_s / RENEWALS
        self._reconnect_s = reconnect_s
        self._report = report
        self._ended = threading.Event()
        self._wanted = threading.Event()
        self._told = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._round_trips: list[tuple[float, float]] = []
        self._breaks: list[tuple[float, str]] = []
        self._begun = self._answered = self._renewed = time.monotonic()
        self._offsets: list[tuple[float, float, float]] = []
        self._seen: tuple[float, UnitState] | None = None
        self._untold = ""
        self._cut: str | None = None
        self._gave_up: str | None = None
        self.lease_lost: str | None = None

    def start(self) -> None:
        """Begin; once only. Raises TargetError when the host does not answer now."""
        # The first answer has the start of the agent in it: it would put the clocks apart by half of that.
        self._ask("ping", timeout_s=PING_S)
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """End; the lease is renewed no more."""
        self._ended.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(PING_S + EVERY_S)

    def require_lease(self) -> None:
        """Raise TargetError when the last renewal was refused."""
        if self.lease_lost is not None:
            raise TargetError(f"the lease on the host was lost: {self.lease_lost}; run again")

    def require_link(self) -> None:
        """Raise LinkLost when the host was not reached again for as long as was to be tried."""
        if self._gave_up is not None:
            raise LinkLost(self._gave_up)

    @property
    def clock_offset_s(self) -> float:
        """The host's CLOCK_MONOTONIC less that of this machine, s, by the shortest of the round trips of CLOCK_S."""
        _, _, offset = min(self._offsets, key=lambda told: told[1])
        return offset

    def watch(self, unit: UnitState) -> None:
        """Look at this unit from now on, whose state is known."""
        with self._told:
            self._seen = time.monotonic(), unit

    def look(self) -> UnitState:
        """The state of the unit that is watched, as of FRESH_S ago or, where the host is slow to answer, of OLD_S ago.

        Takes LOOK_S seconds at most. Raises LinkLost when the host does not tell.
        """
        asked = time.monotonic()
        with self._told:
            if self._age_s > FRESH_S and self._cut is None:
                self._wanted.set()
                self._told.wait_for(lambda: self._age_s < time.monotonic() - asked or self._cut is not None, LOOK_S)
            if self._cut is not None:
                raise LinkLost(self._cut)
            if self._seen is None or self._age_s > OLD_S:
                why = f"the host has said nothing of the server for {self._age_s:.0f} s{self._untold}"
                self._breaks.append((time.monotonic(), why))
                raise LinkLost(why)
            return self._seen[1]

    def record(self, since: float) -> LinkRecord:
        """What became of the link since a moment of time.monotonic(), a round trip that begins now included.

        Waits for that round trip until the host is reached again; raises LinkLost when it is not.
        """
        asked = time.monotonic()
        with self._told:
            self._told.wait_for(lambda: self._begun >= asked or self._gave_up is not None)
        self.require_link()
        broken = [why for at, why in self._breaks if at >= since]
        round_trips = tuple(seconds for at, seconds in self._round_trips if at >= since)
        return LinkRecord(round_trips, broken[0] if broken else None)

    @property
    def _age_s(self) -> float:
        return float("inf") if self._seen is None else time.monotonic() - self._seen[0]

    def _run(self) -> None:
        next_beat = time.monotonic()
        try:
            while not self._ended.is_set():
                try:
                    if time.monotonic() >= next_beat:
                        next_beat = time.monotonic() + EVERY_S
                        self._beat()
                    self._look()
                except LinkLost as error:
                    self._find_again(error)
                except TargetError as error:
                    self._untold = f" ({error})"
                except Exception as error:  # whatever it is, the lease must be renewed
                    self._find_again(LinkLost(f"{type(error).__name__}: {error}"))
                self._wanted.wait(max(0.0, next_beat - time.monotonic()))
                self._wanted.clear()
        finally:
            # Nobody may wait for what comes no more.
            with self._told:
                self._gave_up = self._gave_up or "the link to the host is watched no more"
                self._told.notify_all()

    def _beat(self) -> None:
        begun = time.monotonic()
        answer = self._ask("ping", timeout_s=PING_S)
        ended = self._answered
        offset = float(answer["monotonic"]) - (begun + ended) / 2
        recent = [told for told in self._offsets if told[0] > ended - CLOCK_S]
        self._offsets = [*recent, (ended, ended - begun, offset)]
        if ended - self._renewed >= self._renew_every_s:
            self._renew()
        with self._told:
            self._round_trips.append((ended, ended - begun))
            self._begun = begun
            self._told.notify_all()

    def _renew(self) -> None:
        answer = self._ask("renew", lease=self._lease_path, token=self._token)
        self._renewed = time.monotonic()
        self.lease_lost = None if answer["renewed"] else str(answer["why"])

    def _look(self) -> None:
        if self._seen is None:
            return
        begun, name = time.monotonic(), self._seen[1].name
        state = parse_show(self._ask("state", unit=name, scope=self._scope)["show"])
        with self._told:
            # Another unit may be watched by now.
            if self._seen[1].name == name:
                self._seen = begun, state
            self._told.notify_all()

    def _ask(self, operation: str, *, timeout_s: float = ANSWER_S, **values: Any) -> dict[str, Any]:
        begun = time.monotonic()
        answer = self._agent.ask(operation, timeout_s=timeout_s, **values)
        self._answered = time.monotonic()
        still_s = self._answered - begun - float(answer.get("took_s", 0.0))
        if still_s > STALL_S:
            self._breaks.append((self._answered, f"the link stood still for {still_s:.1f} s"))
        return answer

    def _find_again(self, error: LinkLost) -> None:
        """Start the agent anew until it answers, the pulse is stopped, or it has been tried for long enough."""
        began = time.monotonic()
        self._tell_cut(f"the link was cut: {error}")
        while not self._ended.is_set():
            with suppress(TargetError):
                self._agent.open()
                # First of all: the lease may be about to run out.
                self._renew()
                why = f"the link was cut for {time.monotonic() - self._answered:.0f} s"
                self._tell_cut(why)
                self._cut = None
                self._report(f"{why} and is back")
                return
            if time.monotonic() - began > self._reconnect_s:
                self._gave_up = f"the host was not reached again within {self._reconnect_s:.0f} s"
                self._ended.set()
                return
            self._ended.wait(EVERY_S)

    def _tell_cut(self, why: str) -> None:
        with self._told:
            self._cut = why
            # Both its beginning and its end count: what is measured may begin, or end, between them.
            self._breaks.append((time.monotonic(), why))
            self._told.notify_all()
