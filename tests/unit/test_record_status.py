"""One rule for what became of a cell, and what is measured again when it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_bench.record_status import reason_of, status_of, timed_out, to_retry

DEADLINE = "the cell's deadline of 3 s was reached"


@pytest.mark.parametrize(
    ("record", "status", "reason", "late", "retried"),
    [
        ({"status": "ok", "aborted": None, "reason": None}, "ok", None, 0, False),
        ({"status": "ok"}, "ok", None, 0, False),
        ({"status": "ok", "request_statuses": {"ok": 3, "timeout": 2}}, "ok", None, 2, True),
        ({"status": "ok", "request_statuses": {"ok": 3, "truncated": 2}}, "ok", None, 0, False),
        ({"status": "ok", "aborted": DEADLINE, "request_statuses": {"ok": 3}}, "aborted", DEADLINE, 0, True),
        ({"status": "failed", "aborted": DEADLINE, "reason": "none succeeded"}, "failed", "none succeeded", 0, True),
        ({"status": "failed", "reason": "it died"}, "failed", "it died", 0, True),
    ],
)
def test_a_record_says_what_became_of_it(
    record: dict[str, Any], status: str, reason: str | None, late: int, retried: bool
) -> None:
    assert (status_of(record), reason_of(record), timed_out(record), to_retry(record)) == (
        status,
        reason,
        late,
        retried,
    )
