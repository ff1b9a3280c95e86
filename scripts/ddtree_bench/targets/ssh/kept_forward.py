"""A port forward that is opened anew, at the same port of this machine, whenever it has ended."""

from __future__ import annotations

import threading
import time

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh.destination import Destination
from ddtree_bench.targets.ssh.forward import PortForward

LOOK_EVERY_S = 0.2
AGAIN_EVERY_S = 1.0

OPEN_S = 20.0
"""How long the first opening may take."""

OPEN_AGAIN_S = 10.0


class KeptForward:
    """The way from this machine to a port of the host, from `start` to `stop`."""

    def __init__(self, destination: Destination, port_there: int, host_there: str) -> None:
        self._forward = PortForward(destination, port_there, host_there)
        self._breaks: list[tuple[float, str]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="port forward", daemon=True)

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the port, http://HOST:PORT."""
        return self._forward.base_url

    def start(self) -> None:
        """Open it; once only. Raises TargetError when no port leads there."""
        self._forward.start(OPEN_S)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._forward.stop()

    def break_since(self, moment: float) -> str | None:
        """Why what came through it since a moment of time.monotonic() was broken off; None when nothing was."""
        broken = [why for at, why in self._breaks if at >= moment]
        if broken or self._forward.alive:
            return broken[0] if broken else None
        return "the port forward has ended"

    def _keep(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            if not self._forward.alive:
                last = self._forward.said.splitlines()[-1:]
                self._note(f"the port forward ended: {''.join(last) or 'OpenSSH does not say why'}")
                self._open_again()

    def _open_again(self) -> None:
        while not self._ended.is_set():
            try:
                self._forward.start(OPEN_AGAIN_S)
            except TargetError:
                self._ended.wait(AGAIN_EVERY_S)
            else:
                self._note("the port forward was opened anew")
                return

    def _note(self, why: str) -> None:
        # Both its end and its new beginning: what is measured may begin, or end, between them.
        self._breaks.append((time.monotonic(), why))
