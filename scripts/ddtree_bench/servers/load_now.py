"""How many requests run and wait on a server now, from the lightest page that tells."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from ddtree_bench.servers import prometheus_text
from ddtree_bench.servers.pages import Pages, Unanswered
from ddtree_bench.servers.sglang_releases import release_of

NOW = ("running_requests", "queued_requests")


class NotTold(RuntimeError):
    """A page that does not tell how many requests run and wait."""


class LoadNow:
    """Asks one page of a server; a call returns NOW. Raises Unanswered or NotTold. For one thread at a time."""

    def __init__(self, pages: Pages, path: str, read: Callable[[bytes], dict[str, float]]) -> None:
        self._pages = pages
        self._read = read
        self.path = path

    def __call__(self) -> Mapping[str, float]:
        """Ask now."""
        return self._read(self._pages.get(self.path))

    def close(self) -> None:
        """Give the connection up; the next call opens another."""
        self._pages.close()


def from_loads(page: bytes) -> dict[str, float]:
    """Return NOW from SGLang's /v1/loads: its ranks are the data-parallel ones, so they are summed. Raises NotTold."""
    told = _object(page)
    ranks = told.get("loads")
    if not isinstance(ranks, list) or not ranks or release_of(str(told.get("version"))).refused:
        raise NotTold("no loads of a release that is known")
    return _numbers(
        {
            name: sum(_of(rank, key) for rank in ranks)
            for name, key in zip(NOW, ("num_running_reqs", "num_waiting_reqs"), strict=True)
        }
    )


def from_counters(page: bytes) -> dict[str, float]:
    """Return NOW from the embedded engine's /server_info. Raises NotTold."""
    counters = _object(page).get("counters")
    return _numbers({name: _of(counters, name) for name in NOW})


def from_gauges(page: bytes) -> dict[str, float]:
    """Return NOW from the two gauges of a Prometheus text, each request counted once. Raises NotTold."""
    try:
        sums = [
            prometheus_text.over_ranks(prometheus_text.over_priorities(prometheus_text.pick(page, f"sglang:{key}")))
            for key in ("num_running_reqs", "num_queue_reqs")
        ]
    except ValueError as error:
        raise NotTold(str(error)) from error
    return _numbers({name: math.nan if value is None else value for name, value in zip(NOW, sums, strict=True)})


SOURCES: tuple[tuple[str, Callable[[bytes], dict[str, float]]], ...] = (
    ("/v1/loads?include=core", from_loads),
    ("/server_info", from_counters),
    ("/metrics", from_gauges),
)
"""The lightest first. SGLang's schedulers write what /v1/loads says into shared memory every 15 steps, its gauges only
every 40, and a server has them only with --enable-metrics, in a text of 100 KiB and more."""


def load_now(base_url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> LoadNow | None:
    """Return what asks the first of SOURCES that tells now; None when the server tells nowhere. Raises nothing."""
    pages = Pages(base_url, timeout_s, headers)
    for path, read in SOURCES:
        ask = LoadNow(pages, path, read)
        try:
            ask()
        except (Unanswered, NotTold) as error:
            if isinstance(error, Unanswered) and error.gone:
                break
        else:
            return ask
    pages.close()
    return None


def _object(page: bytes) -> dict[str, Any]:
    try:
        found = json.loads(page)
    except ValueError as error:
        raise NotTold("no JSON") from error
    if not isinstance(found, dict):
        raise NotTold("no JSON object")
    return found


def _of(part: Any, key: str) -> float:
    value = part.get(key) if isinstance(part, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def _numbers(values: dict[str, float]) -> dict[str, float]:
    if not all(math.isfinite(value) for value in values.values()):
        raise NotTold("does not tell how many requests run and wait")
    return values
