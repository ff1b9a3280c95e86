"""What a target has for a run: asked in one round trip, by a program that needs no more than a POSIX shell there."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_bench.targets.launcher import Launcher, TargetError

PROGRAM = Path(__file__).with_name("program.sh")
TIMEOUT_S = 12.0
END = "end"

GPU_FIELDS = ("index", "uuid", "name", "driver", "memory_mib", "used_mib", "persistence", "power_w", "default_power_w")
"""The columns of nvidia-smi that the program asks for, in order."""


@dataclass(frozen=True)
class Facts:
    """What the program printed: values by name, in order. `clock_ahead_s` is the target's clock less ours, s."""

    values: Mapping[str, Sequence[str]]
    clock_ahead_s: float

    def one(self, name: str) -> str | None:
        """The first value of a name; None where the target has none."""
        return next(iter(self.all(name)), None)

    def all(self, name: str) -> Sequence[str]:
        """Every value of a name."""
        return self.values.get(name, ())

    @property
    def gpus(self) -> list[dict[str, str]]:
        """The GPUs, by GPU_FIELDS."""
        return [dict(zip(GPU_FIELDS, _columns(line), strict=False)) for line in self.all("gpu")]

    @property
    def gpu_processes(self) -> list[tuple[str, str]]:
        """Who computes on the GPUs: the GPU's UUID, and the process in words."""
        # Where there is none, some versions say so in words.
        lines = [columns for line in self.all("gpu_process") if len(columns := _columns(line)) > 2]
        return [(uuid, f"process {process} ({', '.join(name)})") for uuid, process, *name in lines]


def ask(launcher: Launcher, *, port: int, address: str, lease: str, paths: Sequence[str]) -> Facts:
    """Ask a target what it has, and what lies at absolute paths there.

    `address` is the IPv4 address that servers listen on; port 0 is none in particular. The values of `path` are, in
    order: missing, unreadable, unconfigured (a folder without a config.json) or there. Raises TargetError when the
    target cannot be reached or has no shell that runs the program.
    """
    argv = ["sh", "-s", "--", str(port), kernel_address(address), lease, *paths]
    began = time.time()
    result = launcher.run_command(argv, timeout_s=TIMEOUT_S, stdin=PROGRAM.read_text())
    lines = result.stdout.splitlines()
    if not lines or lines[-1] != END:
        said = (result.stderr.strip() or result.stdout.strip())[-300:]
        raise TargetError(
            f"a shell program did not run to its end there: {said or f'it ended with {result.exit_code}'}; "
            f"see that `{shlex.join(argv[:2])}` works for this login, and that its start-up files print nothing"
        )
    values = defaultdict(list)
    for line in lines:
        name, _, value = line.partition(" ")
        values[name].append(value)
    return Facts(values, float(values["time"][0]) - began)


def kernel_address(address: str) -> str:
    """Return an IPv4 address as /proc/net/tcp writes it, 127.0.0.1 as 0100007F; "-" for what is none."""
    try:
        return bytes(reversed([int(part) for part in address.split(".")])).hex().upper()
    except ValueError:
        return "-"


def _columns(line: str) -> list[str]:
    return [value.strip() for value in line.split(",")]
