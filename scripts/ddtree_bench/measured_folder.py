"""A folder that holds one measurement: the raw record, which is never changed, and what is computed from it.

`requests.parquet` has one row a request: the raw columns and, beside them, what was computed from each.
`measurement.json` says what was asked for, sent and seen. `server_samples.parquet` is the server's load while it was
measured. All of `metrics.json` is computed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from ddtree_bench import metrics
from ddtree_bench.load import requests_table
from ddtree_bench.load.tokenizer import Tokenizer
from ddtree_bench.metrics.slos import Slos
from ddtree_bench.plan import Load
from ddtree_bench.records.files import sync, write_json

REQUESTS = "requests.parquet"
SERVER_SAMPLES = "server_samples.parquet"
MEASUREMENT = "measurement.json"
METRICS = "metrics.json"

FORMAT = 1
"""Raised when measurement.json changes so that older ones cannot be read."""


class FolderError(RuntimeError):
    """A folder that cannot take a measurement, or holds none; the message names the file and what to do."""


def prepare(folder: Path) -> None:
    """Make a folder and see that it can be written. Raises FolderError when it cannot, or holds a measurement."""
    for name in (REQUESTS, MEASUREMENT):
        if (folder / name).exists():
            raise FolderError(f"{folder / name}: exists, and nothing measured is overwritten; give another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise FolderError(f"{folder}: cannot be written ({error.strerror}); give another --out") from error


def write_raw(
    folder: Path, requests: pd.DataFrame, server_samples: pd.DataFrame, measurement: Mapping[str, Any]
) -> None:
    """Write the raw record; `requests` has the columns of requests_table.SCHEMA. What is not a number becomes null.

    Raises FolderError when it cannot be written.
    """
    with _writing(folder):
        _replace(folder / SERVER_SAMPLES, lambda path: server_samples.to_parquet(path, index=False))
        write_json(folder / MEASUREMENT, {"format": FORMAT, **plain(measurement)})
        _replace(folder / REQUESTS, lambda path: requests_table.write(requests, path))


def compute(folder: Path, tokenizer: Tokenizer | None = None, slos: Slos | None = None) -> dict[str, Any]:
    """Compute what the raw record says, write it and return the content of metrics.json.

    The raw columns stay as they are. `tokenizer` counts the tokens where the server did not say, `slos` replace those
    of the measurement; both hold for this computation only. Raises FolderError when the folder holds no measurement or
    cannot be written.
    """
    measurement = read_measurement(folder)
    raw = _read(folder / REQUESTS, requests_table.read)
    samples = _read(folder / SERVER_SAMPLES, pd.read_parquet)
    given = measurement["slos"]
    counted = raw if tokenizer is None else _counted(raw, tokenizer)
    parsed = metrics.parse(counted)
    document = metrics.document(
        counted,
        Load(**measurement["load"]),
        measurement["client"],
        samples,
        measurement["counters"],
        measurement["planned"],
        measurement["aborted"],
        method=measurement["method"],
        slos=slos or (Slos(**given) if given else None),
        parsed=parsed,
    )
    derived = metrics.request_metrics(parsed)
    with _writing(folder):
        _replace(folder / REQUESTS, lambda path: requests_table.write(raw, path, derived))
        write_json(folder / METRICS, plain(document))
    return document


def read_measurement(folder: Path) -> dict[str, Any]:
    """Return the content of measurement.json. Raises FolderError that names the file when it cannot be used."""
    path = folder / MEASUREMENT
    found = _read(path, lambda path: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FolderError(f"{path}: is not of the format {FORMAT}; compute with the version that measured it")
    return found


def plain(value: Any) -> Any:
    """Return a value as JSON has it: mappings, lists, and null for what is not a finite number."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    if hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _counted(raw: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
    return raw.assign(event_tokenized=[tokenizer.counts(list(texts)) for texts in raw["event_texts"]])


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(path)
    except FileNotFoundError as error:
        raise FolderError(f"{path}: does not exist; give a folder that `measure --out` wrote") from error
    except (OSError, ValueError) as error:
        raise FolderError(f"{path}: cannot be read ({error}); restore it from a copy, or measure again") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from error


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file so that a reader sees the whole of it or the one before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
