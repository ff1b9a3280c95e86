"""Prometheus counters of rounds, beside SGLang's own and with its labels, in GET /metrics."""

from __future__ import annotations

from typing import Any

from sglang_ddtree.rounds import STAGES, Round

PREFIX = "sglang:ddtree_"


class RoundCounters:
    """Adds rounds to counters.

    `collector` is SGLang's collector of a scheduler's metrics: its labels are ours, and so are the classes that it may
    have in the place of prometheus_client's. `depth` is the most drafts that a round can accept.
    """

    def __init__(self, collector: Any, depth: int) -> None:
        # Only now: SGLang sets the folder that processes share before it makes its collector.
        import prometheus_client

        new_counter = collector._counter_cls or prometheus_client.Counter
        new_histogram = collector._histogram_cls or prometheus_client.Histogram
        labels = dict(collector.labels)

        def counter(name: str, documentation: str, *more: str) -> Any:
            return new_counter(PREFIX + name, documentation, labelnames=[*labels, *more])

        self._rounds = counter("rounds_total", "Rounds of a batch.").labels(**labels)
        self._request_rounds = counter("request_rounds_total", "Rounds, counted for each request.").labels(**labels)
        self._discarded = counter(
            "discarded_request_rounds_total", "Rounds computed for a request that had ended before."
        ).labels(**labels)
        self._nodes = counter("nodes_total", "Drafted tokens that the target verified.").labels(**labels)
        self._branching = counter("branching_nodes_total", "Tree nodes with two children or more.").labels(**labels)
        self._accepted = counter("accepted_drafts_total", "Drafted tokens that the target accepted.").labels(**labels)
        self._committed = counter("committed_tokens_total", "Tokens of answers that rounds made.").labels(**labels)
        self._lengths = new_histogram(
            PREFIX + "accepted_drafts_per_round",
            "Drafted tokens that the target accepted in a round of a request.",
            labelnames=[*labels],
            buckets=range(depth + 1),
        ).labels(**labels)
        seconds = counter("stage_seconds_total", "Time of each stage of all rounds, of the device if any.", "stage")
        self._seconds = {stage: seconds.labels(**labels, stage=stage) for stage in STAGES}

    def __call__(self, done: Round) -> None:
        """Add a round."""
        self._rounds.inc()
        self._request_rounds.inc(len(done.requests))
        self._discarded.inc(done.discarded)
        self._nodes.inc(done.nodes)
        self._branching.inc(sum(request.branching_nodes for request in done.requests))
        self._accepted.inc(sum(request.accepted for request in done.requests))
        self._committed.inc(sum(request.committed for request in done.requests))
        for request in done.requests:
            self._lengths.observe(request.accepted)
        for stage, seconds in done.seconds.items():
            self._seconds[stage].inc(seconds)
