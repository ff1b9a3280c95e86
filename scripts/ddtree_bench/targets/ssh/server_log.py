"""The log of a server on a host: what its unit wrote, copied into a file of this machine as far as it has been read."""

from __future__ import annotations

from pathlib import Path

from ddtree_bench.targets.ssh.systemd import Systemd

LINE_BYTES = 1024
"""What a line of a log has at most, as a rule."""


class ServerLog:
    """The log of one start. `path` is its file here, which may hold those of earlier starts."""

    def __init__(self, systemd: Systemd, unit: str, path: Path) -> None:
        self.path = path
        self._systemd = systemd
        self._unit = unit
        self._cursor: str | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def fetch(self, *, ended: bool = False) -> None:
        """Append what was written since the last call; with `ended`, all that the unit, which has ended, ever wrote.

        Raises LinkLost when the host is not reached, TargetError when its journal cannot be read.
        """
        text, self._cursor = self._systemd.journal(self._unit, self._cursor, ended=ended)
        with self.path.open("a", encoding="utf-8", newline="") as log:
            log.write(text)

    def tail(self, lines: int) -> str:
        """The last lines that have been fetched."""
        with self.path.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - lines * LINE_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
