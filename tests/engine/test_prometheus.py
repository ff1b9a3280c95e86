"""What /metrics says: SGLang's names, and numbers that belong to what was asked of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_client import CHAT, CHAT_PATH, USAGE, InProcess, chat, in_process
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from ddtree_reference.method import Method
from ddtree_reference.prometheus import Measured, RequestTimes, Throughput
from ddtree_reference.startup import Opened

SPEC = {"return_spec_tokens_details": True}
GAUGES = {
    "num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "max_total_num_tokens", "gen_throughput",
    "cache_hit_rate", "spec_accept_length", "spec_accept_rate",
}  # fmt: skip
COUNTERS = {
    "prompt_tokens", "generation_tokens", "cached_tokens", "num_requests", "num_aborted_requests", "spec_verify_calls",
}  # fmt: skip
HISTOGRAMS = {"time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"}


@pytest.fixture
def api(toy: Opened) -> Iterator[InProcess]:
    with in_process(toy, Method("DDTREE", budget=16)) as served:
        yield served


def families(api: InProcess) -> dict[str, Metric]:
    reply = api.get("/metrics")
    assert reply.status == 200 and reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {
        family.name.removeprefix("sglang:"): family for family in text_string_to_metric_families(reply.body.decode())
    }
    assert all(family.name.startswith("sglang:") for family in found.values())
    assert {sample.labels["model_name"] for family in found.values() for sample in family.samples} == {"toy"}
    return found


def values(api: InProcess) -> dict[str, float]:
    """The value of each sample, without its prefix; buckets of histograms left out."""
    return {
        sample.name.removeprefix("sglang:"): sample.value
        for family in families(api).values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_names_and_types_are_sglangs(api: InProcess) -> None:
    found = families(api)
    assert {name for name, family in found.items() if family.type == "gauge"} == GAUGES
    assert {name for name, family in found.items() if family.type == "counter"} == COUNTERS
    assert {name for name, family in found.items() if family.type == "histogram"} == HISTOGRAMS
    counters = {sample.name for family in found.values() for sample in family.samples if family.type == "counter"}
    assert "sglang:prompt_tokens_total" in counters and all(name.endswith("_total") for name in counters)
    buckets = [sample.labels["le"] for sample in found["inter_token_latency_seconds"].samples if "le" in sample.labels]
    assert {"0.002", "0.1", "8.0", "+Inf"} <= {*buckets}


def test_a_fresh_server_has_done_nothing(api: InProcess) -> None:
    now = values(api)
    room = now.pop("max_total_num_tokens")
    assert room >= 8 * 2048 and {*now.values()} == {0.0}


def test_numbers_belong_to_the_requests(api: InProcess) -> None:
    bodies: list[dict[str, Any]] = [chat(api, max_tokens=n, **SPEC) for n in (1, 20)]
    last = api.post(CHAT_PATH, CHAT | USAGE | SPEC | {"n": 2}).events()[-1]
    now = values(api)
    usages = [body["usage"] for body in (*bodies, last)]
    assert now["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == 69
    assert now["num_requests_total"] == 4, "choices count"
    assert now["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages) + usages[0]["prompt_tokens"]
    specs = [body["sglext"]["spec_tokens_details"] for body in bodies] + last["sglext"]["spec_tokens_details"]
    rounds = sum(spec["spec_verify_ct"] for spec in specs)
    accepted = sum(spec["spec_num_correct_drafts"] for spec in specs)
    assert now["spec_verify_calls_total"] == rounds
    assert now["spec_accept_length"] == pytest.approx(1 + accepted / rounds)
    proposed = sum(spec["spec_num_proposed_drafts"] for spec in specs)
    assert now["spec_accept_rate"] == pytest.approx(accepted / proposed)
    assert now["time_to_first_token_seconds_count"] == now["e2e_request_latency_seconds_count"] == 4
    assert now["inter_token_latency_seconds_count"] == 69 - 4, "every token but the first of each answer"
    waited = now["time_to_first_token_seconds_sum"] + now["inter_token_latency_seconds_sum"]
    assert 0 < waited <= now["e2e_request_latency_seconds_sum"] + 1e-6
    assert now["num_running_reqs"] == now["num_queue_reqs"] == now["gen_throughput"] == 0
    assert api.get("/server_info").json()["internal_states"][0]["last_gen_throughput"] > 0


def test_a_client_that_leaves_is_an_aborted_request(api: InProcess) -> None:
    api.post(CHAT_PATH, CHAT | {"stream": True, "max_tokens": 1900}, leave_after=4)
    while values(api)["num_aborted_requests_total"] == 0:
        pass
    now = values(api)
    assert now["num_requests_total"] == 1 and now["e2e_request_latency_seconds_count"] == 0
    assert now["num_used_tokens"] == now["token_usage"] == 0


def test_a_gap_is_shared_by_the_tokens_it_brings() -> None:
    registry = CollectorRegistry()
    measured = Measured("m", registry)
    measured.throughput.began(100.0)
    times = RequestTimes(measured, 2, began=100.0)
    times.heard(0, 1, False, 100.5)
    times.heard(1, 1, False, 101.0)
    times.heard(0, 0, False, 101.1)
    times.heard(0, 4, False, 101.5)
    times.heard(0, 0, True, 102.0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang:{name}", {"model_name": "m", **labels})

    assert value("time_to_first_token_seconds_sum") == pytest.approx(0.5 + 1.0)
    assert value("inter_token_latency_seconds_count") == 4
    assert value("inter_token_latency_seconds_sum") == pytest.approx(1.0)
    assert value("inter_token_latency_seconds_bucket", le="0.2") == 0
    assert value("inter_token_latency_seconds_bucket", le="0.4") == 4, "a quarter of a second each"
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(2.0)


def test_throughput_is_measured_over_stretches_with_requests() -> None:
    throughput = Throughput()
    assert throughput.now == throughput.last == 0
    throughput.began(10.0)
    throughput.generated(3, 10.5)
    assert throughput.now == 0, "no stretch has ended yet"
    throughput.began(10.6)
    throughput.generated(7, 11.25)
    assert throughput.now == throughput.last == pytest.approx(10 / 1.25)
    throughput.ended(11.3)
    throughput.generated(2, 11.65)
    throughput.ended(11.75)
    assert throughput.now == 0 and throughput.last == pytest.approx(2 / 0.5)
    throughput.began(500.0)
    throughput.ended(501.0)
    assert throughput.last == pytest.approx(2 / 0.5), "no tokens, no news"
