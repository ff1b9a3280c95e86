"""The scripted server as a process of its own, and the stamps it took."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import requests
from numpy.typing import NDArray

from ddtree_bench.load.calibration.schedule import Schedule

_PACKAGES = Path(__file__).parents[3]
_END_S = 5.0


@dataclass(frozen=True)
class RequestStamps:
    """What the server did for one request, moments in seconds of time.perf_counter().

    `arrived` is when the kernel received its last byte and `read` when the server had read it; `sends` has the moment
    of each event's send call, the last of them that of the end of the stream.
    """

    arrived: float
    read: float
    sends: NDArray[np.float64] = field(repr=False)


@dataclass(frozen=True)
class Stamps:
    """Stamps by the SHA-256 of the prompt, and the CPU time, s, that the server had used since it started."""

    requests: Mapping[str, RequestStamps]
    cpu_s: float


@dataclass(frozen=True)
class ServerProcess:
    """A running server: its base URL, its process id and its schedule."""

    url: str
    pid: int
    schedule: Schedule

    def take_stamps(self) -> Stamps:
        """Return the stamps of all requests since this was last called; the server forgets them."""
        with requests.Session() as session:
            # A proxy of the environment has no way to this machine's loopback.
            session.trust_env = False
            answer = session.get(f"{self.url}/stamps", timeout=60).json()
        stamps = {
            digest: RequestStamps(one["arrived"], one["read"], np.array(one["sends"], dtype=float))
            for digest, one in answer["requests"].items()
        }
        return Stamps(stamps, float(answer["cpu_s"]))


@contextmanager
def calibration_server(schedule: Schedule) -> Iterator[ServerProcess]:
    """Run the scripted server on a free port of the loopback; it ends with the context, and with this process.

    Raises RuntimeError when it does not start.
    """
    argv = [
        *(sys.executable, "-m", "ddtree_bench.load.calibration.server", "--follow-stdin"),
        *("--ttft-ms", repr(schedule.ttft_s * 1e3), "--interval-ms", repr(schedule.interval_s * 1e3)),
        *("--events", str(schedule.events), "--tokens-per-event", str(schedule.tokens_per_event)),
    ]
    path = os.pathsep.join([str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the calibration server did not start, exit status {process.wait(_END_S)}")
            yield ServerProcess(url, process.pid, schedule)
        finally:
            process.terminate()
