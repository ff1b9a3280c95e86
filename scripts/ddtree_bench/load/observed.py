"""A cell as every client measures it: the server observed before and after, its log, and its machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import pandas as pd

from ddtree_bench.load import server_samples
from ddtree_bench.load.cell import Measurement, measure
from ddtree_bench.load.cell_work import CellWork
from ddtree_bench.load.outcome import CellOutcome
from ddtree_bench.load.telemetry import Telemetry
from ddtree_bench.load.telemetry_summary import measured_window
from ddtree_bench.servers.log_lines import cell_log, log_size, nothing_logged
from ddtree_bench.servers.observation import Observation, observe

OBSERVE_TIMEOUT_S = 10.0

SETTLE_S = 2.0
"""How long it may take to notice an end of the server that its clients have met already."""


def measure_observed(
    work: CellWork,
    *,
    fetch_log: Callable[[], Path | None],
    ended: Callable[[], str | None],
    telemetry: AbstractContextManager[Telemetry | None],
) -> CellOutcome:
    """Measure a cell. Nothing about the server is raised; what `fetch_log` raises first, before any request, is.

    `fetch_log` gives the file with the server's log so far, None where it is not to be had. When it raises OSError,
    RuntimeError or SubprocessError after the last answer, the record says so and the cell is kept. `ended` is polled:
    the first reason that it returns, such as how the server ended, ends the cell. `telemetry` watches the machine of
    the server while it is entered, or gives None.
    """
    started_at, before = now(), _observe(work)
    log_begin = log_size(fetch_log())
    with telemetry as watched:
        measurement = _measure(work, ended)
    server_ended = ended() if (measurement.requests["status"] == "ok").all() else _end_within(SETTLE_S, ended)
    after = _observe(work)
    log, said = _log_of_cell(fetch_log, log_begin)
    return CellOutcome(
        measurement=measurement,
        before=before,
        after=after,
        server_log=said,
        log=log,
        telemetry=_summary(watched, measurement),
        telemetry_samples=_samples(watched, measurement),
        started_at=started_at,
        ended_at=now(),
        server_ended=server_ended,
    )


def _measure(work: CellWork, ended: Callable[[], str | None]) -> Measurement:
    return measure(
        work.base_url,
        work.workload,
        work.prompts,
        work.load,
        work.model,
        abort=ended,
        sample=server_samples.sampler_for(work.base_url, work.headers),
        limits=work.limits,
        headers=work.headers,
        seed=work.seed,
    )


def _summary(watched: Telemetry | None, measurement: Measurement) -> dict[str, Any] | None:
    window = measured_window(measurement.requests)
    return None if watched is None or window is None else watched.summary(*window)


def _samples(watched: Telemetry | None, measurement: Measurement) -> pd.DataFrame | None:
    if watched is None or measurement.requests.empty:
        return None
    frame = watched.frame()
    return None if frame.empty else frame


def _log_of_cell(fetch_log: Callable[[], Path | None], begin: int) -> tuple[bytes, dict[str, Any]]:
    """The server's log from its start on, and what it says of the cell that began at a byte of it."""
    try:
        path = fetch_log()
    except (OSError, RuntimeError, SubprocessError) as error:
        return b"", nothing_logged(f"the server's log could not be fetched when the cell had ended: {error}")
    end = log_size(path)
    return path.read_bytes() if path is not None and path.exists() else b"", cell_log(path, begin, end)


def _end_within(seconds: float, ended: Callable[[], str | None]) -> str | None:
    """Wait until the end of the server is noticed, if there is one to notice."""
    deadline = time.monotonic() + seconds
    while (reason := ended()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return reason


def now() -> str:
    """Return the moment as records have it, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _observe(work: CellWork) -> Observation:
    return observe(work.base_url, timeout_s=OBSERVE_TIMEOUT_S, headers=work.headers)
