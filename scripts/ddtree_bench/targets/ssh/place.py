"""What the configuration says of a host that is reached over SSH."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class HostPlace:
    """What the configuration says of a host that is reached over SSH.

    `name` is its key in `targets`. `root` is the folder on the host that holds what is deployed, `cache` one of this
    machine for what is put together to be sent.
    """

    name: str
    ssh_host: str
    ssh_config: Path | None
    scope: Literal["system", "user"]
    root: str
    cache: Path
    lease_directory: str
    lease_ttl_s: float
    reconnect_s: float
    address: str = "127.0.0.1"
    memory_max_bytes: int | None = None

    def lease_path(self, name: str) -> str:
        """The file on the host of a lease, which runs on the host itself take as well."""
        return f"{self.lease_directory}/{name}.lease"
