"""What became of an attempt at a cell, read off its record or view: one rule for every table, summary and command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Status = Literal["ok", "aborted", "failed"]


def status_of(record: Mapping[str, Any]) -> Status:
    """Return the status of a record, or of a view of it.

    `failed`: nothing was measured. `aborted`: it was broken off before all of its requests were answered; what was
    measured is kept, and enters no ratio. `ok`: everything was sent, whatever became of single requests.
    """
    if record["status"] != "ok":
        return "failed"
    return "aborted" if record.get("aborted") else "ok"


def reason_of(record: Mapping[str, Any]) -> str | None:
    """Return why a cell failed or was broken off; None for one that is ok."""
    reason: str | None = record["aborted"] if status_of(record) == "aborted" else record.get("reason")
    return reason


def timed_out(record: Mapping[str, Any]) -> int:
    """Return how many of its requests ran into the time limit of a request; 0 for records that do not say."""
    return int((record.get("request_statuses") or {}).get("timeout", 0))


def to_retry(record: Mapping[str, Any]) -> bool:
    """Whether `retry_failed` measures it again: it failed, was broken off, or has requests that timed out."""
    return status_of(record) != "ok" or timed_out(record) > 0
