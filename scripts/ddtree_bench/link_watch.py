"""What is done through the link to a target counts only when the link held all the while; else it is done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ddtree_bench.project import Report
from ddtree_bench.running_server import RunningServer
from ddtree_bench.servers.ready import ServerFailed
from ddtree_bench.targets.launcher import LinkRecord, TargetError

TRIES = 3

Result = TypeVar("Result")


def while_linked(
    server: RunningServer, what: str, work: Callable[[], Result], report: Report
) -> tuple[Result, LinkRecord]:
    """Return what `work` returns, and what became of the link to the server meanwhile.

    When the link was cut meanwhile neither a result nor a ServerFailed counts: the server is found again, and the work
    is done again, TRIES times in all. Raises TargetError when the link held in none of them, and what `work` and
    `RunningServer.find_again` raise.
    """
    for tries in range(1, TRIES + 1):
        with server.watched_link() as link:
            done = _result_or_failure(work)
            record = link()
        if record.broken is None:
            if isinstance(done, ServerFailed):
                raise done
            return done, record
        report(f"{what}: {record.broken}, so nothing of it is kept (try {tries} of {TRIES})")
        server.find_again()
    raise TargetError(
        f"{what}: the link to the target did not hold in any of {TRIES} tries, the last time since {record.broken}; "
        "see to the network, or set `client: target` so that the link carries no load, then run again"
    )


def _result_or_failure(work: Callable[[], Result]) -> Result | ServerFailed:
    try:
        return work()
    except ServerFailed as failure:
        return failure
