"""Running and queued requests as they are sampled beside a measurement.

The samples under sglang/ were constructed from each release's own code; they were not captured from a live server.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest
from pages_server import sample, serving

from ddtree_bench import metrics
from ddtree_bench.load import server_samples
from ddtree_bench.load.server_samples import Sampler, sampler_for
from ddtree_bench.servers.load_now import LoadNow, from_gauges
from ddtree_bench.servers.observation import INFO, METRICS, interpret
from ddtree_bench.servers.pages import Unanswered


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


COUNTERS = json.dumps({"counters": {"running_requests": 5, "queued_requests": 2}}).encode()


@pytest.mark.parametrize(
    ("pages", "path", "running", "queued"),
    [
        ({"/v1/loads": sample("0.5.14", "v1_loads.json"), "/server_info": COUNTERS}, "/v1/loads?include=core", 4, 0),
        ({"/server_info": COUNTERS, "/metrics": sample("0.5.17", "prometheus.txt")}, "/server_info", 5, 2),
        ({"/server_info": b"{}", "/metrics": sample("0.5.17", "prometheus_retract.txt")}, "/metrics", 4, 2),
        ({"/v1/loads": b'{"loads": []}', "/metrics": sample("0.5.14", "prometheus_dp2.txt")}, "/metrics", 8, 0),
        ({"/v1/loads": b'{"version": "0.5.9", "loads": [{}]}', "/server_info": COUNTERS}, "/server_info", 5, 2),
    ],
)
def test_the_lightest_page_that_tells_is_asked(pages: dict[str, bytes], path: str, running: int, queued: int) -> None:
    with serving(pages) as site:
        ask = sampler_for(site.base_url, {"Authorization": "Bearer k"})
        assert isinstance(ask, LoadNow) and ask.path == path
        for _ in range(3):
            assert ask() == {"running_requests": running, "queued_requests": queued}
        assert site.connections == 1, "one connection for all"
        assert all(headers["Authorization"] == "Bearer k" for _, headers in site.asked)
        ask.close()


def test_data_parallel_ranks_of_loads_are_summed() -> None:
    loads = json.loads(sample("0.5.20", "v1_loads.json"))
    loads["loads"].append(loads["loads"][0] | {"dp_rank": 1, "num_running_reqs": 7, "num_waiting_reqs": 9})
    with serving({"/v1/loads": json.dumps(loads).encode()}) as site:
        ask = sampler_for(site.base_url)
        assert isinstance(ask, LoadNow)
        assert ask() == {"running_requests": 11, "queued_requests": 9}
        ask.close()


@pytest.mark.parametrize("pages", [{}, {"/metrics": b"vllm:x 1\n", "/server_info": b"[]", "/v1/loads": b"<html>"}])
def test_a_server_that_tells_nowhere_has_no_sampler(pages: dict[str, bytes]) -> None:
    with serving(pages) as site:
        assert sampler_for(site.base_url) is None


def test_gauges_of_single_priorities_are_part_of_the_one_of_all() -> None:
    text = (
        b'sglang:num_running_reqs{tp_rank="0",dp_rank="0",priority=""} 10\n'
        b'sglang:num_running_reqs{tp_rank="0",dp_rank="0",priority="0"} 7\n'
        b'sglang:num_running_reqs{tp_rank="0",dp_rank="0",priority="5"} 3\n'
        b'sglang:num_queue_reqs{tp_rank="0",dp_rank="0",priority="0"} 2\n'
        b'sglang:num_queue_reqs{tp_rank="0",dp_rank="0",priority="5"} 1\n'
    )
    assert from_gauges(text) == {"running_requests": 10, "queued_requests": 3}
    found = interpret({INFO: sample("0.5.17", "server_info.json"), METRICS: text})
    assert (found.values["running_requests"], found.values["queued_requests"]) == (10, 3)


def test_a_server_that_is_gone_has_no_sampler() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert sampler_for(url) is None


def test_a_server_that_stops_telling_costs_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_samples, "EVERY_S", 0.02)
    with serving({"/v1/loads": sample("0.5.20", "v1_loads.json")}) as site:
        ask = sampler_for(site.base_url, timeout_s=0.5)
        assert isinstance(ask, LoadNow)
        with Sampler(ask) as sampler:
            sampler.start()
            wait_for(lambda: len(sampler.frame()) >= 2)
            del site.pages["/v1/loads"]
            wait_for(lambda: sampler.errors >= 2)
        with pytest.raises(Unanswered):
            ask()
        ask.close()
    frame = sampler.frame()
    assert list(frame) == list(server_samples.COLUMNS) and set(frame["running"]) == {4}
    assert frame["time"].is_monotonic_increasing
    assert metrics.server_load(frame) == {
        "server_running_mean": 4.0,
        "server_running_max": 4,
        "server_queued_mean": 0.0,
    }


def test_every_rank_that_reports_a_gauge_tells_of_the_same_requests() -> None:
    line = b'sglang:num_%s_reqs{dp_rank="%d",tp_rank="%d",priority="%d"} %d\n'
    text = b"".join(
        line % (what, dp, 2 * dp + tp, priority, 10 * dp + 3 + priority)
        for what in (b"running", b"queue")
        for dp in (0, 1)
        for tp in (0, 1)
        for priority in (0, 1)
    )
    assert from_gauges(text) == {"running_requests": 34, "queued_requests": 34}
