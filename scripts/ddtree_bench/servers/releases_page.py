"""The reference page of what servers tell of themselves, by release: docs/server-values.md, made from the table."""

from __future__ import annotations

from collections.abc import Iterable

from ddtree_bench.servers.sglang_releases import (
    LOG_OFFERS,
    NEVER,
    NEWEST,
    OFFERS,
    OLDEST,
    REQUEST_OFFERS,
    Offer,
    shown,
)

_INTRODUCTION = f"""# What a server tells of itself

Made from `ddtree_bench.servers.sglang_releases`, which was read in the sources of SGLang {shown(OLDEST)} to
{shown(NEWEST)}; `python -m ddtree_bench generate` writes it. A value that cannot be had is NA, and `missing` says
why. A newer release is read by the names of the newest and noted, an older one is refused. Of ranks that do the
same requests (tensor, pipeline, expert) one counts; data-parallel ranks are summed. Totals are given as their
difference over the cell; when one of them fell, or the version or the start changed, the server was restarted and
none of them counts.

`decode_graph_share` is decode_graph_passes_total / (decode_graph_passes_total + decode_eager_passes_total) over the
cell. `/metrics` needs `--enable-metrics`. A counter is absent before its first increment: that is 0 on a server
whose release is known, and NA otherwise. `generation_tokens_total` moves when a request ends, so it agrees with the
client over whole requests only; `realtime_decode_tokens_total` is live and has what is cut at a request's end.
"""

_EMBEDDED = """## The embedded engine

`/server_info` has `counters` under the names of the first table, `accepted_drafts_total` and
`proposed_drafts_total` among them. Its `/metrics` says the same under SGLang's names, but
`sglang:spec_accept_length` there is over the server's life.

## Running and queued requests

Sampled every second beside the measurement, from the first that tells: SGLang's `/v1/loads` (at most 15 decode
steps old, no flag needed), the embedded engine's `/server_info`, the two gauges of `/metrics` (at most 40 steps
old).
"""


def page() -> str:
    """Return the page, Markdown."""
    never = "\n".join(f"* `{name}`: {why}" for name, why in NEVER.items())
    parts = [
        _INTRODUCTION,
        _table(OFFERS),
        f"Never offered by any release:\n\n{never}\n",
        "## What an answer tells of its request\n",
        _table(REQUEST_OFFERS),
        "The streamed OpenAI routes of releases before 0.5.19 tell nothing of this: they drop "
        "`return_spec_tokens_details` without an error.\n",
        "## What the log tells of a cell\n",
        _table(LOG_OFFERS),
        _EMBEDDED,
    ]
    return "\n".join(parts)


def _table(offers: Iterable[Offer]) -> str:
    lines = ["| name | where | called | releases | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{one.name}` | {one.place} | `{_called(one)}` | {_releases(one)} | {one.meaning} |" for one in offers]
    return "\n".join(lines) + "\n"


def _called(offer: Offer) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in offer.labels.items())
    return f"{offer.key}{{{labels}}}" if labels else offer.key


def _releases(offer: Offer) -> str:
    whole = (offer.since, offer.until) == (OLDEST, NEWEST)
    return "all" if whole else f"{shown(offer.since)} to {shown(offer.until)}"
