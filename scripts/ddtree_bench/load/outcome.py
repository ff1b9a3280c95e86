"""What one cell gave, whoever measured it, and the files in which it comes from another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ddtree_bench.load import requests_table
from ddtree_bench.load.cell import Measurement
from ddtree_bench.records.files import sha256_file, write_json
from ddtree_bench.records.store import REQUESTS, SERVER_LOG, SERVER_SAMPLES, TELEMETRY
from ddtree_bench.servers.observation import Observation
from ddtree_bench.targets.launcher import LinkRecord

OUTCOME = "outcome.json"

DONE = "done.json"
"""Written last, and at once: the digests of all other files of an outcome, or why there is none."""

FILES = (REQUESTS, SERVER_SAMPLES, SERVER_LOG, OUTCOME)
"""What every outcome has beside DONE."""

AS_THEY_ARE = ("server_log", "telemetry", "started_at", "ended_at", "server_ended")
"""Fields of an outcome that JSON holds without a change."""

NO_LINK = LinkRecord()


class OutcomeDamaged(ValueError):
    """A folder that holds no whole outcome; the message names the file."""


@dataclass(frozen=True)
class CellOutcome:
    """What one cell gave.

    Attributes
    ----------
    measurement : Measurement
        The requests, and how the client fared.
    before, after : Observation
        What the server counted before the first request and after the last.
    server_log : dict
        What the server's log says of the cell, as `cell_log` has it.
    log : bytes
        The server's log from its start on.
    telemetry : dict or None
        What the machine of the server did in the measured time, as `Telemetry.summary` has it; None if nobody watched.
    telemetry_samples : DataFrame or None
        What that was made of, columns as in telemetry_summary.COLUMNS; None if nothing was seen.
    started_at, ended_at : str
        ISO 8601, by the clock of the machine that measured.
    server_ended : str or None
        How the server was found to be gone when the client had done.
    link : LinkRecord
        The link that the requests went through.
    cache_not_flushed : str or None
        Why the prefix cache was not emptied before.
    spooled : str or None
        The id of the request to a client on the target that this answers.
    """

    measurement: Measurement
    before: Observation
    after: Observation
    server_log: Mapping[str, Any]
    log: bytes
    telemetry: Mapping[str, Any] | None
    telemetry_samples: pd.DataFrame | None
    started_at: str
    ended_at: str
    server_ended: str | None = None
    link: LinkRecord = NO_LINK
    cache_not_flushed: str | None = None
    spooled: str | None = None


def write_tables(outcome: CellOutcome, folder: Path) -> None:
    """Write the tables of an outcome into a folder, as the store has them."""
    requests_table.write(outcome.measurement.requests, folder / REQUESTS)
    outcome.measurement.server_samples.to_parquet(folder / SERVER_SAMPLES, index=False)
    if outcome.telemetry_samples is not None:
        outcome.telemetry_samples.to_parquet(folder / TELEMETRY, index=False)


def write_outcome(outcome: CellOutcome, folder: Path) -> None:
    """Write an outcome into a folder: first its files, last DONE with their digests."""
    measurement = outcome.measurement
    write_tables(outcome, folder)
    (folder / SERVER_LOG).write_bytes(outcome.log)
    told = {
        "client": measurement.client,
        "planned": measurement.planned,
        "aborted": measurement.aborted,
        "before": asdict(outcome.before),
        "after": asdict(outcome.after),
        **{name: getattr(outcome, name) for name in AS_THEY_ARE},
    }
    write_json(folder / OUTCOME, told)
    written = [name for name in (*FILES, TELEMETRY) if (folder / name).exists()]
    digests = {name: sha256_file(folder / name) for name in written}
    write_json(folder / DONE, {"error": None, "files": digests})


def write_error(error: str, folder: Path) -> None:
    """Write into a folder why there is no outcome."""
    write_json(folder / DONE, {"error": error, "files": {}})


def read_outcome(folder: Path) -> CellOutcome:
    """Read the outcome that `write_outcome` has written on the target; nothing is lost on the way.

    Raises OutcomeDamaged when a file is missing or not what it was, when there is an error instead, and when it was
    written by a release that tells other things.
    """
    _confirm_files(folder)
    try:
        return _read(folder)
    except Exception as error:
        # What pandas, pyarrow and dataclasses raise for content of another kind is told nowhere in full.
        raise OutcomeDamaged(f"{OUTCOME} or a table cannot be read: {type(error).__name__}: {error}") from error


def _read(folder: Path) -> CellOutcome:
    told = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    return CellOutcome(
        measurement=Measurement(
            requests=requests_table.read(folder / REQUESTS),
            client=told["client"],
            server_samples=pd.read_parquet(folder / SERVER_SAMPLES),
            planned=told["planned"],
            aborted=told["aborted"],
        ),
        before=_observation(told["before"]),
        after=_observation(told["after"]),
        log=(folder / SERVER_LOG).read_bytes(),
        telemetry_samples=pd.read_parquet(folder / TELEMETRY) if (folder / TELEMETRY).exists() else None,
        **{name: told[name] for name in AS_THEY_ARE},
    )


def _confirm_files(folder: Path) -> None:
    try:
        done = json.loads((folder / DONE).read_text(encoding="utf-8"))
        error, files = done["error"], dict(done["files"])
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise OutcomeDamaged(f"{DONE} cannot be read: {failure}") from failure
    if error is not None:
        raise OutcomeDamaged(str(error))
    for name in dict.fromkeys((*FILES, *files)):
        path = folder / name
        if not path.is_file() or sha256_file(path) != files.get(name):
            raise OutcomeDamaged(f"{name} is missing, or not what was written")


def _observation(tree: Mapping[str, Any]) -> Observation:
    return Observation(**{**tree, "notes": tuple(tree["notes"])})
