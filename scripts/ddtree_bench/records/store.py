"""The store: `<plan key>/<host key>/attempts/<n>/`, append-only and self-checking. The latest attempt counts.

An attempt holds `record.json` (identity, status, stamps, digests of the other files) and the raw data. Nothing in the
store is ever changed or removed; everything derived from it is made anew by the tables.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_bench import keys
from ddtree_bench.records.files import sha256_file, sync, to_json

RECORD = "record.json"
RECORD_DIGEST = "record.sha256"
REQUESTS = "requests.parquet"
SERVER_SAMPLES = "server_samples.parquet"
SERVER_LOG = "server.log"
TELEMETRY = "telemetry.parquet"


class StoreError(RuntimeError):
    """An entry that is missing or does not agree with its own digests."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a cell; `content_sha256` is the digest of its record, which holds the digests of its files."""

    folder: Path
    record: Mapping[str, Any]
    content_sha256: str

    @property
    def failed(self) -> bool:
        """Whether the cell could not be measured."""
        return self.record["status"] != "ok"

    @property
    def aborted(self) -> str | None:
        """Why the measurement was broken off before all requests were answered; None when it was not."""
        return self.record.get("aborted")


def read_attempt(folder: Path) -> Attempt:
    """Read an attempt. Raises StoreError that names the folder when there is none."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: cannot be read ({error}); restore it from a copy, or move {folder} out of the store and delete "
            "the cell's view to measure it again"
        ) from error
    if not isinstance(record, dict) or not {"plan_key", "host_key", "identity", "status", "files"} <= record.keys():
        raise StoreError(f"{path}: is no record of an attempt; restore it from a copy, or move {folder} away")
    return Attempt(folder, record, keys.digest(record))


class Store:
    """A folder of attempts that clones and people may share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def latest(self, plan_key: str, host_key: str) -> Attempt | None:
        """Return the latest attempt at a cell on a host, or None."""
        numbers = self._numbers(self._attempts_folder(plan_key, host_key))
        if not numbers:
            return None
        return read_attempt(self._attempts_folder(plan_key, host_key) / str(numbers[-1]))

    def attempts(self, plan_key: str, host_key: str) -> list[Attempt]:
        """Return all attempts at a cell on a host, the latest last. Raises StoreError for one that cannot be read."""
        folder = self._attempts_folder(plan_key, host_key)
        return [read_attempt(folder / str(number)) for number in self._numbers(folder)]

    def check_writable(self) -> None:
        """Raise StoreError, which says who must let whom write, when attempts could not be added."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=self.root):
                return
        except OSError as error:
            raise StoreError(
                f"the store {self.root} cannot be written ({error.strerror}), so nothing is measured; make it writable "
                "for this user, or name another one in DDTREE_BENCH_STORE"
            ) from error

    def add(self, record: Mapping[str, Any], write_data: Callable[[Path], None]) -> Attempt:
        """Add an attempt at once: `write_data` fills a folder, the record with the digests of its files comes last.

        `record` names plan_key, host_key and identity; attempt and files are added here. Raises OSError as it comes.
        """
        attempts = self._attempts_folder(record["plan_key"], record["host_key"])
        attempts.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=attempts))
        temporary.chmod(0o755)
        write_data(temporary)
        digests = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
        while True:
            number = max(self._numbers(attempts), default=0) + 1
            text = to_json({**record, "attempt": number, "files": digests})
            (temporary / RECORD).write_text(text, encoding="utf-8")
            (temporary / RECORD_DIGEST).write_text(sha256_file(temporary / RECORD) + "\n", encoding="utf-8")
            for path in temporary.iterdir():
                sync(path)
            sync(temporary)
            try:
                temporary.rename(attempts / str(number))
            except OSError:
                if not (attempts / str(number)).exists():
                    raise
                continue
            sync(attempts)
            return read_attempt(attempts / str(number))

    def entries(self) -> Iterator[Path]:
        """Yield the folder of every attempt, in the order of their names."""
        yield from sorted(self.root.glob("*/*/attempts/[0-9]*"))

    def readable(self) -> Iterator[Attempt]:
        """Yield every attempt that can be read; `problems` names the others."""
        for folder in self.entries():
            try:
                yield read_attempt(folder)
            except StoreError:
                continue

    def problems(self) -> Iterator[str]:
        """Yield a sentence for every entry that does not agree with its name or its digests."""
        for folder in self.entries():
            try:
                record = read_attempt(folder).record
            except StoreError as error:
                yield str(error)
                continue
            yield from _entry_problems(folder, record)

    def relative(self, attempt: Attempt) -> str:
        """Return an attempt's place in the store, as views name it."""
        return attempt.folder.relative_to(self.root).as_posix()

    def _attempts_folder(self, plan_key: str, host_key: str) -> Path:
        return self.root / keys.short(plan_key) / keys.short(host_key) / "attempts"

    @staticmethod
    def _numbers(attempts: Path) -> list[int]:
        if not attempts.is_dir():
            return []
        return sorted(int(entry.name) for entry in attempts.iterdir() if entry.name.isdecimal())


def _entry_problems(folder: Path, record: Mapping[str, Any]) -> Iterator[str]:
    plan_name, host_name = folder.parents[2].name, folder.parents[1].name
    if keys.digest(record["identity"]) != record["plan_key"] or keys.short(record["plan_key"]) != plan_name:
        yield f"{folder}: the identity in the record does not have the plan key of its folder"
    if keys.short(record["host_key"]) != host_name:
        yield f"{folder}: the host key in the record is not that of its folder"
    digest_path = folder / RECORD_DIGEST
    if not digest_path.is_file() or digest_path.read_text(encoding="utf-8").strip() != sha256_file(folder / RECORD):
        yield f"{folder / RECORD}: has been changed since it was written"
    for name, digest in record["files"].items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: is missing"
        elif sha256_file(path) != digest:
            yield f"{path}: has been changed since it was measured"
