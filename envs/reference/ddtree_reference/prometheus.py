"""What /metrics says, under SGLang's names: the engine's counters, and latencies as the HTTP side sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# Upper bounds in seconds: SGLang's, with some below its smallest, which a small model stays under.
TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8,
    1, 2, 4, 6, 8,
)  # fmt: skip
E2E_BUCKETS = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400,
)  # fmt: skip

STRETCH_SECONDS = 1.0

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # SGLang has no "_created" series


class Throughput:
    """Tokens per second while requests are in flight, by stretches of a second; the last one may be shorter."""

    def __init__(self) -> None:
        self.last = 0.0
        self._in_flight = 0
        self._began = 0.0
        self._tokens = 0

    @property
    def now(self) -> float:
        """That of the last stretch; 0 if nothing is in flight."""
        return self.last if self._in_flight else 0.0

    def began(self, now: float) -> None:
        """A request has come at `now` (seconds on any clock that runs on)."""
        if self._in_flight == 0:
            self._began, self._tokens = now, 0
        self._in_flight += 1

    def generated(self, tokens: int, now: float) -> None:
        """A request in flight has got tokens."""
        self._tokens += tokens
        if now - self._began >= STRETCH_SECONDS:
            self._close(now)

    def ended(self, now: float) -> None:
        """A request is no longer in flight."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._close(now)

    def _close(self, now: float) -> None:
        if self._tokens and now > self._began:
            self.last = self._tokens / (now - self._began)
        self._began, self._tokens = now, 0


class Measured:
    """The histograms of latencies and the throughput; belongs to the event loop."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"sglang:{name}", text, ["model_name"], registry=registry, buckets=buckets)
            return family.labels(model_name)

        self.throughput = Throughput()
        self.ttft = histogram("time_to_first_token_seconds", "Time from a request to its first token.", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Gap before an event, shared by its tokens.", ITL_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "Time from a request to its end.", E2E_BUCKETS)


class RequestTimes:
    """Clocks one request of several choices. Times are seconds of one clock."""

    def __init__(self, measured: Measured, choices: int, began: float) -> None:
        self._measured = measured
        self._began = began
        self._heard: list[float | None] = [None] * choices

    def heard(self, choice: int, tokens: int, last: bool, now: float) -> None:
        """An update of a choice with that many new tokens has come; the last one ends it."""
        measured, before = self._measured, self._heard[choice]
        if tokens:
            measured.throughput.generated(tokens, now)
            if before is None:
                measured.ttft.observe(now - self._began)
            else:
                for _ in range(tokens):
                    measured.itl.observe((now - before) / tokens)
            self._heard[choice] = now
        if last:
            measured.e2e.observe(now - self._began)


class EngineCollector(Collector):
    """The engine's counters as Prometheus metrics, read when they are asked for."""

    def __init__(
        self, model_name: str, snapshot: Callable[[], Mapping[str, int]], throughput: Callable[[], float]
    ) -> None:
        self._model_name = model_name
        self._snapshot = snapshot
        self._throughput = throughput

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """All metrics of the engine now. Rates and lengths are of the server's life."""
        now = self._snapshot()
        rounds, accepted = now["verify_calls_total"], now["accepted_drafts_total"]
        yield self._gauge("num_running_reqs", "Requests that are being decoded.", now["running_requests"])
        yield self._gauge("num_queue_reqs", "Requests that wait.", now["queued_requests"])
        yield self._gauge("max_total_num_tokens", "Tokens the KV cache has room for.", now["kv_tokens_total"])
        yield self._gauge("num_used_tokens", "Tokens in the KV cache.", now["kv_tokens_used"])
        usage = _ratio(now["kv_tokens_used"], now["kv_tokens_total"])
        yield self._gauge("token_usage", "Share of the KV cache in use.", usage)
        yield self._gauge("gen_throughput", "Generated tokens per second now.", self._throughput())
        hit_rate = _ratio(now["cached_tokens_total"], now["prompt_tokens_total"])
        yield self._gauge("cache_hit_rate", "Share of prompt tokens from the prefix cache.", hit_rate)
        length = _ratio(rounds + accepted, rounds)
        yield self._gauge("spec_accept_length", "Tokens of a verify round, bonus included.", length)
        rate = _ratio(accepted, now["proposed_drafts_total"])
        yield self._gauge("spec_accept_rate", "Share of proposed drafts that were accepted.", rate)
        yield self._counter("spec_verify_calls", "Verify rounds.", rounds)
        yield self._counter("prompt_tokens", "Tokens of prompts.", now["prompt_tokens_total"])
        yield self._counter("cached_tokens", "Tokens of prompts from the prefix cache.", now["cached_tokens_total"])
        yield self._counter("generation_tokens", "Generated tokens.", now["generation_tokens_total"])
        yield self._counter("num_requests", "Requests taken; n choices count n times.", now["requests_total"])
        yield self._counter("num_aborted_requests", "Requests that were cancelled.", now["aborted_requests_total"])

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"sglang:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"sglang:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
