"""What the processors of this machine do at a moment: use, clocks, load, energy. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ddtree_bench.targets.cpu_facts import PROC, SYS, read_text
from ddtree_bench.targets.nvidia import Answer

CPUINFO_CLOCK = re.compile(r"^cpu MHz\s*:\s*([\d.]+)$", re.MULTILINE)


class Cpus:
    """The processors of this machine, to be sampled again and again."""

    def __init__(self, proc: Path = PROC, sys_root: Path = SYS) -> None:
        self._proc = proc
        self._sys = sys_root
        self._times: tuple[int, int] | None = None
        self._packages = [_Package(path) for path in rapl_packages(sys_root)]

    def sample(self) -> Answer:
        """Return what they do now; the use is that since the sample before, so the first has none."""
        answer = Answer()
        answer.put("utilization_percent", self._utilization(), "there is no sample before the first")
        answer.put("clock_mhz", self._clock_mhz(), "the kernel tells of no clocks")
        answer.put("load_average", os.getloadavg()[0], "")
        answer.put("energy_j", *self._energy_j())
        return answer

    def _utilization(self) -> float | None:
        before, self._times = self._times, busy_and_all(read_text(self._proc / "stat"))
        if before is None or self._times is None or self._times[1] == before[1]:
            return None
        return 100 * (self._times[0] - before[0]) / (self._times[1] - before[1])

    def _clock_mhz(self) -> float | None:
        clocks = [float(value) for value in CPUINFO_CLOCK.findall(read_text(self._proc / "cpuinfo"))]
        if not clocks:
            files = (self._sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
            clocks = [float(text) / 1000 for file in files if (text := read_text(file).strip())]
        return sum(clocks) / len(clocks) if clocks else None

    def _energy_j(self) -> tuple[float | None, str]:
        if not self._packages:
            return None, f"there is no RAPL counter below {self._sys / 'class/powercap'}"
        used = [package.energy_j() for package in self._packages]
        known = [joules for joules in used if joules is not None]
        if len(known) < len(used):
            return None, f"{self._packages[0].counter} cannot be read: only root may"
        return sum(known), ""


class _Package:
    """The energy counter of one socket, which starts again at 0 when it is full."""

    def __init__(self, folder: Path) -> None:
        self.counter = folder / "energy_uj"
        self._full = int(read_text(folder / "max_energy_range_uj") or 0)
        self._last: int | None = None
        self._used = 0

    def energy_j(self) -> float | None:
        """Return the energy used since the first reading, J; None when it cannot be read."""
        text = read_text(self.counter).strip()
        if not text:
            return None
        now = int(text)
        if self._last is not None:
            self._used += now - self._last if now >= self._last else now + self._full - self._last
        self._last = now
        return self._used / 1e6


def rapl_packages(sys_root: Path = SYS) -> list[Path]:
    """Return the folders of the counters of whole sockets; those of their parts are counted in these."""
    zones = sorted((sys_root / "class/powercap").glob("intel-rapl:*"))
    return [zone for zone in zones if read_text(zone / "name").startswith("package")]


def busy_and_all(stat: str) -> tuple[int, int] | None:
    """Return the ticks that the CPUs were busy and all their ticks since the start, in the text of /proc/stat.

    Waiting for a disk is not busy. What guests of this machine used is in user and nice already.
    """
    line = re.search(r"^cpu +(.+)$", stat, re.MULTILINE)
    if line is None:
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, line.group(1).split()[:8])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait
