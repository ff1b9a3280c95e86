"""Networks of the lab: each host has a network namespace and a pair of interfaces to this machine or to a jump host."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from commands import call

ALL = "10.213.0.0/16"
NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class Network:
    """The network of one host: `namespace` is the host's, `via` that of its jump host, None for this machine's."""

    number: int
    namespace: str
    via: str | None = None

    @property
    def address(self) -> str:
        """The host's address."""
        return f"10.213.{self.number}.2"

    @property
    def _gateway(self) -> str:
        return f"10.213.{self.number}.1"

    @property
    def _interface(self) -> str:
        return f"lab-{self.number}"

    @property
    def _near(self) -> list[str]:
        return ["ip"] if self.via is None else ["ip", "-n", self.via]

    @property
    def _far(self) -> list[str]:
        return ["ip", "-n", self.namespace]

    def create(self) -> None:
        """Make the namespace and both interfaces, and put them up."""
        call("ip", "netns", "add", self.namespace)
        # Without it a connection to an address that has no host would leave by the machine's default route.
        call("ip", "route", "replace", "unreachable", ALL)
        peer = ["peer", "name", "host0", "netns", self.namespace]
        call(*self._near, "link", "add", self._interface, "type", "veth", *peer)
        call(*self._near, "address", "add", f"{self._gateway}/32", "peer", f"{self.address}/32", "dev", self._interface)
        call(*self._near, "link", "set", self._interface, "up")
        call(*self._far, "address", "add", f"{self.address}/24", "dev", "host0")
        call(*self._far, "link", "set", "lo", "up")
        self.link_up()

    def link_down(self) -> None:
        """Cut the link at the host's end: packets of both sides vanish, and nobody is told."""
        call(*self._far, "link", "set", "host0", "down")

    def link_up(self) -> None:
        """Join the link again."""
        call(*self._far, "link", "set", "host0", "up")

    def remove(self) -> None:
        """Remove what is there of the network."""
        if (NAMESPACES / self.namespace).exists():
            # A namespace takes its interfaces along some time after it has gone; another host may want the name before.
            subprocess.run([*self._far, "link", "del", "host0"], capture_output=True, check=False)
            call("ip", "netns", "del", self.namespace)


def remove_fence() -> None:
    """Remove the route that keeps the lab's addresses from leaving the machine."""
    subprocess.run(["ip", "route", "del", "unreachable", ALL], capture_output=True, check=False)
