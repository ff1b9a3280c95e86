"""What SGLang's releases tell of themselves: where, under which name, and what the number means.

Read in the sources of the releases 0.5.14 to 0.5.23. Names that hold in all of them carry no limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Number = tuple[int, int, int]
Place = Literal["/metrics", "/server_info", "/v1/loads", "spec_tokens_details", "meta_info", "log"]

OLDEST: Number = (0, 5, 14)
NEWEST: Number = (0, 5, 23)


@dataclass(frozen=True)
class Release:
    """A server's version: what it says, the release by whose names it is read, and what is to be known of that.

    `number` is None when it names none of them, and `note` says why; `refused` when it is older, so that its names are
    not known and nothing is to be read.
    """

    text: str
    number: Number | None
    note: str | None = None
    refused: bool = False


@dataclass(frozen=True)
class Offer:
    """One thing that releases `since` to `until` tell.

    Attributes
    ----------
    name : str
        Ours; one name has one definition.
    place, key : str
        Where it is, and what it is called there.
    meaning : str
        What it counts or is divided by, and when it moves.
    labels : mapping
        Labels that a series of `key` must have.
    zero : bool
        Whether the key is absent as long as it is 0.
    speculative : bool
        Whether only a server that speculates has it.
    trees : bool
        Whether only a server with our plugin's DDTREE has it.
    """

    name: str
    place: Place
    key: str
    meaning: str
    labels: Mapping[str, str] = field(default_factory=dict)
    zero: bool = False
    speculative: bool = False
    trees: bool = False
    since: Number = OLDEST
    until: Number = NEWEST


def _counter(name: str, key: str, meaning: str, mode: str | None = None, speculative: bool = False) -> Offer:
    labels = {} if mode is None else {"mode": mode}
    return Offer(name, "/metrics", f"sglang:{key}", meaning, labels, zero=True, speculative=speculative)


def _tree_counter(name: str, key: str, meaning: str, stage: str | None = None) -> Offer:
    labels = {} if stage is None else {"stage": stage}
    return Offer(name, "/metrics", f"sglang:ddtree_{key}", meaning, labels, trees=True, since=_PLUGIN)


_PLUGIN: Number = (0, 5, 23)
"""The release that our plugin is made for."""

_ROUND = "moves with every round"
_STAGE = "the device's time where there is one; moves with every round, of a batch counted once"
_ENDED = "moves when a request ends"
_STEP = "moves with every step"
_LOAD = "a snapshot: at most 15 decode steps old (--load-snapshot-publish-interval)"
_REPORT = "of the last report, every 40 decode steps (--decode-log-interval)"

OFFERS: tuple[Offer, ...] = (
    _counter("requests_total", "num_requests_total", f"requests; {_ENDED}"),
    _counter("aborted_requests_total", "num_aborted_requests_total", f"requests that were aborted; {_ENDED}"),
    _counter("prompt_tokens_total", "prompt_tokens_total", f"prompt tokens, cached ones included; {_ENDED}"),
    _counter("cached_tokens_total", "cached_tokens_total", f"of these, from the prefix cache, all sources; {_ENDED}"),
    _counter("generation_tokens_total", "generation_tokens_total", f"output tokens, the prefill's included; {_ENDED}"),
    _counter(
        "verify_calls_total", "spec_verify_calls_total", f"rounds of each request, summed; {_ENDED}", speculative=True
    ),
    _tree_counter("accepted_drafts_total", "accepted_drafts_total", f"accepted drafts before the cut; {_ROUND}"),
    _tree_counter("proposed_drafts_total", "nodes_total", f"tree nodes, roots not counted; {_ROUND}"),
    _tree_counter("tree_rounds_total", "request_rounds_total", f"rounds of each request, summed; {_ROUND}"),
    _tree_counter("tree_nodes_total", "nodes_total", f"tree nodes, roots not counted; {_ROUND}"),
    _tree_counter(
        "tree_branching_nodes_total",
        "branching_nodes_total",
        f"nodes with two children or more, roots included; {_ROUND}",
    ),
    *(
        _tree_counter(f"{stage}_seconds_total", "stage_seconds_total", f"s in the stage {stage}, {_STAGE}", stage)
        for stage in ("draft", "head_topk", "tree", "verify", "commit")
    ),
    _counter("retractions_total", "num_retracted_requests_total", "requests put back into the queue; every rank"),
    _counter(
        "realtime_decode_tokens_total",
        "realtime_tokens_total",
        f"tokens that decode steps committed: bonus and what is cut later included, the prefill's not; {_STEP}",
        "decode",
    ),
    _counter(
        "realtime_prefill_tokens_total", "realtime_tokens_total", f"prompt tokens computed; {_STEP}", "prefill_compute"
    ),
    _counter(
        "realtime_cached_tokens_total",
        "realtime_tokens_total",
        f"prompt tokens from the cache; {_STEP}",
        "prefill_cache",
    ),
    _counter(
        "decode_graph_passes_total",
        "cuda_graph_passes_total",
        f"decode steps in a CUDA graph; {_STEP}",
        "decode_cuda_graph",
    ),
    _counter(
        "decode_eager_passes_total", "cuda_graph_passes_total", f"decode steps without one; {_STEP}", "decode_none"
    ),
    _counter(
        "prefill_graph_passes_total", "cuda_graph_passes_total", f"prefills in a graph; {_STEP}", "prefill_cuda_graph"
    ),
    _counter("prefill_eager_passes_total", "cuda_graph_passes_total", f"prefills without; {_STEP}", "prefill_none"),
    Offer("running_requests", "/v1/loads", "num_running_reqs", f"requests that run, all DP ranks; {_LOAD}"),
    Offer("running_requests", "/metrics", "sglang:num_running_reqs", f"the same, {_REPORT}"),
    Offer("queued_requests", "/v1/loads", "num_waiting_reqs", f"requests that wait, all DP ranks; {_LOAD}"),
    Offer("queued_requests", "/metrics", "sglang:num_queue_reqs", f"the same, {_REPORT}"),
    Offer(
        "accept_length_interval",
        "/metrics",
        "sglang:spec_accept_length",
        f"tokens a round: drafts and bonus, what is cut later included, the prefill's token not; {_REPORT}",
        speculative=True,
    ),
    Offer(
        "accept_rate_interval",
        "/metrics",
        "sglang:spec_accept_rate",
        f"accepted drafts / (rounds x (verify_width - 1)); {_REPORT}",
        speculative=True,
    ),
    Offer(
        "accept_length_lifetime",
        "/server_info",
        "avg_spec_accept_length",
        "as accept_length_interval, over all reports since the start or the last flush of the cache",
        speculative=True,
    ),
    Offer(
        "verify_width",
        "/server_info",
        "speculative_num_draft_tokens",
        "tokens a verify pass takes: a tree's budget and its root",
        speculative=True,
    ),
    Offer(
        "max_running_requests",
        "/server_info",
        "effective_max_running_requests_per_dp",
        "requests that the server lets run at once, all DP ranks",
    ),
    Offer(
        "verify_graph_memory_gb",
        "/server_info",
        "target_verify",
        "memory of the verify passes' CUDA graphs, GB, a DP rank; above 0 one was captured",
        speculative=True,
        since=(0, 5, 17),
    ),
)
"""What a server tells of itself. Where a name is given twice, the first is the better."""

_BEFORE_21: Number = (0, 5, 20)

REQUEST_OFFERS: tuple[Offer, ...] = (
    Offer("rounds", "meta_info", "spec_verify_ct", "verify passes of the request"),
    Offer("accepted", "meta_info", "spec_num_correct_drafts", "accepted drafts before the cut: no bonus, no prefill"),
    Offer("accepted", "meta_info", "spec_accepted_drafts", "the same", until=_BEFORE_21),
    Offer(
        "proposed",
        "meta_info",
        "spec_num_proposed_drafts",
        "rounds x (verify_width - 1): a tree's nodes, not its depth",
    ),
    Offer("proposed", "meta_info", "spec_proposed_drafts", "the same", until=_BEFORE_21),
    Offer("histogram", "meta_info", "spec_correct_drafts_histogram", "rounds by accepted drafts, before the cut"),
    Offer("histogram", "meta_info", "spec_accept_histogram", "the same", until=_BEFORE_21),
    Offer("accept_rate", "meta_info", "spec_accept_rate", "accepted / proposed"),
    Offer(
        "accept_length_biased",
        "meta_info",
        "spec_accept_length",
        "completion tokens / rounds: the prefill's token is in it, so it is not an accept length; never used",
    ),
    Offer("retractions", "meta_info", "num_retractions", "times the request was put back; not in spec_tokens_details"),
    Offer(
        "spec_tokens_details",
        "spec_tokens_details",
        "sglext.spec_tokens_details",
        "the keys of meta_info that begin with spec_, absent ones as 0; asked for by return_spec_tokens_details",
        since=(0, 5, 19),
    ),
)
"""What an answer tells of its request. Absent, not 0, without speculation and when no round was needed."""

LOG_OFFERS: tuple[Offer, ...] = (
    Offer("decode_lines", "log", "Decode batch", "a report of 40 decode steps of one DP rank (--decode-log-interval)"),
    Offer("running_max", "log", "#running-req", "requests that run, at the report's last step"),
    Offer(
        "cuda_graph_line_share",
        "log",
        "cuda graph",
        "whether the report's last step ran in a graph; cpu, npu, musa too",
    ),
    Offer(
        "logged_accept_length_mean",
        "log",
        "accept len",
        "tokens a round of the report: drafts and bonus, what is cut later included, the prefill's token not",
        speculative=True,
    ),
    Offer("retracted_requests", "log", "#retracted_reqs", "requests put back by a full cache; every rank logs it"),
    Offer(
        "verify_width",
        "log",
        "num_tokens_per_bs",
        "tokens a request brings to the captured verify pass: a tree's budget and its root",
        speculative=True,
        until=(0, 5, 15),
    ),
    Offer("verify_width", "log", "num_tokens_per_req", "the same", speculative=True, since=(0, 5, 16)),
)
"""What a server's log tells of a cell, as `log_lines.log_summary` has it."""

NEVER: Mapping[str, str] = {
    "accepted_drafts_total": "no release of SGLang counts accepted drafts over all requests, but our plugin's DDTREE; "
    "each answer's details do",
    "proposed_drafts_total": "no release of SGLang counts them, but our plugin's DDTREE; they are verify_calls_total x "
    "(verify_width - 1)",
    "decode_graph": "sglang:is_cuda_graph is never set by any release; decode_graph_passes_total is the proof",
}
"""Names that a server of another engine may have, or that look as if they were offered, and why they are not."""

_VERSION = re.compile(r"\s*v?(\d+)\.(\d+)\.(\d+)")


def release_of(text: str | None) -> Release:
    """Return the release by whose names a server of version `text` is read.

    Parts after the third number (`.post1`, `rc1`, `+local`) do not matter. One newer than NEWEST is read by its names,
    and noted. One older than OLDEST is refused, and one that cannot be told has no number; `note` has the reason.
    """
    match = _VERSION.match(text or "")
    known = f"{shown(OLDEST)} to {shown(NEWEST)} are known"
    if text is None or match is None:
        return Release(text or "", None, f"SGLang does not tell its version ({text!r}); {known}")
    number: Number = (int(match[1]), int(match[2]), int(match[3]))
    if number == (0, 0, 0):
        return Release(text, None, f"SGLang {text} is a build that names no release; {known}")
    if number < OLDEST:
        return Release(
            text, None, f"SGLang {text} is older than the releases whose names are known; {known}", refused=True
        )
    if number > NEWEST:
        return Release(
            text, NEWEST, f"SGLang {text} is newer than {shown(NEWEST)} and is read by the names of that one"
        )
    return Release(text, number)


def shown(number: Number) -> str:
    """Return a release as it is written."""
    return ".".join(map(str, number))


def offers(number: Number, among: tuple[Offer, ...] = OFFERS) -> tuple[Offer, ...]:
    """Return what a release offers."""
    return tuple(one for one in among if one.since <= number <= one.until)


def why_not(name: str, number: Number) -> str:
    """Return why a release does not offer `name`."""
    if name in NEVER:
        return NEVER[name]
    ranges = [
        f"{shown(one.since)} to {shown(one.until)}"
        for one in (*OFFERS, *REQUEST_OFFERS, *LOG_OFFERS)
        if one.name == name
    ]
    return f"SGLang {shown(number)} does not tell it; offered by {', '.join(ranges) or 'no release'}"
