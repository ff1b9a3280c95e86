"""What the server's machine does while a cell is measured: samples taken there, by the clock of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pandas as pd

from ddtree_bench.load.telemetry_summary import COLUMNS, TEXTS, summarize
from ddtree_bench.targets import host_tools
from ddtree_bench.targets.launcher import CommandResult, Stream

PROGRAM = "ddtree_bench.targets.telemetry"

FIRST_SAMPLE_S = 15.0
"""How long the first sample may take: Python must start there, and the driver answer."""

OpenStream = Callable[[Sequence[str], Callable[[str], None]], Stream]
"""Starts a command on the machine of the server, as Launcher.open_stream does."""


def program(python: str, tools: str) -> list[str]:
    """Return the command that samples; `tools` is where this package lies there, as Launcher.tools gives it."""
    return host_tools.command_line(python, tools, PROGRAM)


class Telemetry:
    """Watches the machine of the server from the time it is entered until it is left.

    Entered, it waits for the first sample, so that the samples begin before what is measured does. It raises nothing:
    what went wrong is in the summary.

    Parameters
    ----------
    open_stream : function
        Starts a command on that machine and takes its lines.
    argv : sequence of str
        The command, as `program` gives it.
    clock_offset_s : float
        That machine's CLOCK_MONOTONIC less the time.perf_counter of this process, s: 0 on one machine, where both are
        the same clock.
    """

    def __init__(self, open_stream: OpenStream, argv: Sequence[str], clock_offset_s: float = 0.0) -> None:
        self._open_stream = open_stream
        self._argv = argv
        self._offset_s = clock_offset_s
        self._lines: list[str] = []
        self._sampled = threading.Event()
        self._stream: Stream | None = None
        self._errors: list[str] = []

    def __enter__(self) -> Telemetry:
        try:
            self._stream = self._open_stream(self._argv, self._take)
        except Exception as error:
            self._errors.append(f"the sampler could not be started: {error}")
        else:
            self._wait_for_a_sample(self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is None:
            return
        early = self._stream.ended
        try:
            result = self._stream.close()
        except Exception as failure:
            self._errors.append(f"the sampler could not be ended: {failure}")
        else:
            self._note_end(result, early)

    def frame(self) -> pd.DataFrame:
        """Return the samples, one row a moment and device, in the columns of telemetry_summary.COLUMNS."""
        _, samples, _ = self._read()
        rows = [
            {
                **dict.fromkeys(COLUMNS),
                **{name: _text(value) if name in TEXTS else value for name, value in values.items()},
                "time": sample["monotonic"] - self._offset_s,
                "unix_time": sample["time"],
                "device": device,
            }
            for sample in samples
            for device, values in sample["devices"].items()
        ]
        frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
        return frame.astype({name: "float64" for name in COLUMNS if name not in TEXTS})

    def summary(self, begin: float, end: float) -> dict[str, Any]:
        """Return what the machine did from `begin` to `end`, s of time.perf_counter; see `summarize`.

        `source` says what was asked about GPUs, `errors` what went wrong with the sampling.
        """
        header, samples, unreadable = self._read()
        missing = {name: why for sample in samples for name, why in sample["missing"].items()}
        return {
            "source": header.get("source"),
            "every_s": header.get("every_s"),
            "clock_offset_s": self._offset_s,
            **summarize(self.frame(), missing, begin, end),
            "errors": [*self._errors, *unreadable],
        }

    def _take(self, line: str) -> None:
        # Read when the measurement is over: whoever measures has the interpreter for itself.
        self._lines.append(line)
        if len(self._lines) > 1:
            self._sampled.set()

    def _wait_for_a_sample(self, stream: Stream) -> None:
        deadline = time.monotonic() + FIRST_SAMPLE_S
        while not self._sampled.wait(0.05) and not stream.ended and time.monotonic() < deadline:
            continue

    def _note_end(self, result: CommandResult, early: bool) -> None:
        if early or result.exit_code != 0:
            how = f"signal {result.signal}" if result.signal else f"exit status {result.exit_code}"
            said = result.stderr.strip()[-500:]
            self._errors.append(f"the sampler ended {'early' if early else 'badly'}, {how}" + f": {said}" * bool(said))

    def _read(self) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], list[str]]:
        """The header, the samples, and what is to be said of lines that are neither."""
        header: Mapping[str, Any] = {}
        samples: list[Mapping[str, Any]] = []
        unreadable = []
        for line in self._lines:
            try:
                told = json.loads(line)
                if "devices" in told:
                    samples.append({name: told[name] for name in ("monotonic", "time", "devices", "missing")})
                else:
                    header = {name: told[name] for name in ("source", "every_s")}
            except (ValueError, KeyError, TypeError):
                unreadable.append(f"the sampler printed {line[:200]!r}")
        return header, samples, unreadable


def _text(value: Sequence[str] | None) -> str | None:
    return None if value is None else " ".join(value)
