"""Logins on the lab's hosts as the package uses them: commands over OpenSSH, and the service manager of the login."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from ddtree_bench.targets.launcher import CommandResult
from ddtree_bench.targets.ssh.systemd import Systemd
from ddtree_bench.targets.ssh.unit import Unit
from ddtree_bench.targets.unit_state import UnitState

TIMEOUT_S = 30.0
KEEP_S = 30
"""A connection that is not used for so long closes itself."""

Scope = Literal["system", "user"]


@dataclass
class Login:
    """A user of a host, over one connection, with the units that a test has installed."""

    client_config: Path
    host: str
    user: str
    scope: Scope
    installed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.systemd = Systemd(self.run, self.scope, "lab")

    def run(self, argv: Sequence[str], *, timeout_s: float = TIMEOUT_S, stdin: str = "") -> CommandResult:
        """Run a command on the host."""
        options = ["-o", "ControlMaster=auto", "-o", f"ControlPath={self._socket}", "-o", f"ControlPersist={KEEP_S}"]
        ssh = ["ssh", "-F", str(self.client_config), "-o", "BatchMode=yes", *options, "-l", self.user, self.host]
        done = subprocess.run(
            [*ssh, shlex.join(argv)], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def output(self, *argv: str, stdin: str = "") -> str:
        """Return what a command printed that must not fail."""
        result = self.run(argv, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    def unit(self, *argv: str, **values: Any) -> Unit:
        """A unit with a name of its own."""
        name = f"ddtree-bench-{uuid4().hex[:12]}.service"
        self.installed.append(name)
        user = self.user if self.scope == "system" and self.user != "root" else None
        return Unit(
            **{"name": name, "description": "a test", "argv": argv, "user": user, "stop_grace_s": 5.0, **values}
        )

    def start(self, unit: Unit, secrets: Mapping[str, str] | None = None) -> UnitState:
        """Install a unit and start it."""
        self.systemd.install(unit)
        return self.systemd.start(unit.name, TIMEOUT_S, secrets)

    def ended(self, name: str) -> UnitState:
        """The state of a unit once it has no process any more."""
        return seen(lambda: self.systemd.state(name), lambda state: not state.alive)

    def clean(self) -> None:
        """Remove the units that are installed."""
        if self.installed:
            self.systemd._systemctl("stop", "--", *self.installed)
        for name in self.installed:
            self.systemd.remove(name)
        self.installed.clear()

    def close(self) -> None:
        """Remove the units that are installed, and close the connection."""
        self.clean()
        argv = ["ssh", "-o", f"ControlPath={self._socket}", "-O", "exit", self.host]
        subprocess.run(argv, capture_output=True, check=False)

    @property
    def _socket(self) -> Path:
        # Short: the path of a socket has 108 bytes at most.
        return Path(f"/tmp/lab-{self.client_config.stat().st_ino}-{self.host}-{self.user}")


def seen(look: Callable[[], Any], enough: Callable[[Any], bool], timeout_s: float = 20.0) -> Any:
    """What is seen once it is enough."""
    deadline = time.monotonic() + timeout_s
    while not enough(last := look()):
        assert time.monotonic() < deadline, f"still {last}"
        time.sleep(0.05)
    return last
