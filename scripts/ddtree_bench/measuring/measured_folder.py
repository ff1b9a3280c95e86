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
from ddtree_bench.load import requests_table, server_samples
from ddtree_bench.load.tokenizer import Tokenizer
from ddtree_bench.metrics.recount import recounted
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
    for name in (REQUESTS, MEASUREMENT, SERVER_SAMPLES, METRICS):
        if (folder / name).exists():
            raise FolderError(f"{folder / name}: exists, and nothing measured is overwritten; give another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise FolderError(f"{folder}: cannot be written ({error.strerror}); give another --out") from error


def write_raw(folder: Path, requests: pd.DataFrame, samples: pd.DataFrame, measurement: Mapping[str, Any]) -> None:
    """Write the raw record; `requests` has the columns of requests_table.SCHEMA. What is not a number becomes null.

    The requests come first: they are what cannot be had again. Raises FolderError when something cannot be written.
    """
    with _writing(folder):
        _replace(folder / REQUESTS, lambda path: requests_table.write(requests, path))
        _replace(folder / SERVER_SAMPLES, lambda path: samples.to_parquet(path, index=False))
        write_json(folder / MEASUREMENT, {"format": FORMAT, **plain(measurement)})


def compute(folder: Path, tokenizer: Tokenizer | None = None, slos: Slos | None = None) -> dict[str, Any]:
    """Compute what the raw record says, write it and return the content of metrics.json.

    The raw columns stay as they are. `tokenizer` counts the tokens where the server did not say, `slos` replace those
    of the measurement; both hold for this computation only. Raises FolderError when the folder holds no measurement or
    cannot be written.
    """
    measurement = read_measurement(folder)
    raw = _read(folder / REQUESTS, requests_table.read)
    samples = _read(folder / SERVER_SAMPLES, _samples)
    counted = raw if tokenizer is None else recounted(raw, tokenizer)
    parsed = metrics.parse(counted)
    document = metrics.document(
        counted,
        measurement["load"],
        measurement["client"],
        samples,
        measurement["counters"],
        measurement["planned"],
        measurement["aborted"],
        method=measurement["method"],
        slos=slos or measurement["slos"],
        parsed=parsed,
    )
    derived = metrics.request_metrics(parsed)
    with _writing(folder):
        _replace(folder / REQUESTS, lambda path: requests_table.write(raw, path, derived))
        write_json(folder / METRICS, plain(document))
    return document


def read_measurement(folder: Path) -> dict[str, Any]:
    """Return the content of measurement.json, `load` a Load and `slos` Slos or None.

    Raises FolderError that names the file, and the key, when it cannot be used.
    """
    path = folder / MEASUREMENT
    found = _read(path, lambda path: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FolderError(f"{path}: is not of the format {FORMAT}; compute with the version that measured it")
    for key, convert in _KEYS.items():
        try:
            found[key] = convert(found[key])
        except (KeyError, TypeError, ValueError) as error:
            what = "is missing" if key not in found else f"cannot be used ({error})"
            raise FolderError(f"{path}: {key} {what}; restore the file from a copy, or measure again") from error
    return found


def _one_of(*kinds: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError(f"it is {value!r}")
        return value

    return convert


_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "load": lambda value: Load(**value),
    "slos": lambda value: Slos(**value) if value else None,
    "client": _one_of(dict),
    "counters": _one_of(dict, type(None)),
    "planned": _one_of(int),
    "aborted": _one_of(str, type(None)),
    "method": _one_of(str, type(None)),
}
"""What is computed from, and what makes it usable."""


def _samples(path: Path) -> pd.DataFrame:
    found = pd.read_parquet(path)
    if missing := [name for name in server_samples.COLUMNS if name not in found]:
        raise ValueError(f"it has no column {missing}")
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
    if isinstance(value, str | Path):
        # A path may hold bytes that are no UTF-8.
        return str(value).encode("utf-8", "backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    except (ValueError, OverflowError) as error:
        raise FolderError(f"{folder}: not all of it could be written ({error}); what is there is kept") from error


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
