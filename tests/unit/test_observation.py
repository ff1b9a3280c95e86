"""What is read from the pages of SGLang and of the embedded engine.

The samples under sglang/ were constructed from each release's own code; they were not captured from a live server, and
their numbers are invented (sglang/README.md).
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from pages_server import SAMPLES, sample, serving
from prometheus_client import CollectorRegistry, generate_latest

from ddtree_bench.servers import api, prometheus_text
from ddtree_bench.servers.observation import INFO, LOADS, METRICS, Observation, difference, interpret, observe
from ddtree_bench.servers.observation_names import MOMENTS, TOTALS
from ddtree_bench.servers.pages import Pages, Unanswered
from ddtree_bench.servers.sglang_releases import OFFERS, REQUEST_OFFERS, offers, release_of
from ddtree_reference.prometheus import EngineCollector

TEXTS = ("0.5.14", "0.5.16", "0.5.17")
"""Releases whose Prometheus texts differ in what is read; 0.5.18 to 0.5.23 are as 0.5.17."""

RUN = {
    "requests_total": 32,
    "aborted_requests_total": 0,
    "prompt_tokens_total": 640,
    "cached_tokens_total": 64,
    "generation_tokens_total": 1152,
    "verify_calls_total": 320,
    "retractions_total": 0,
    "realtime_decode_tokens_total": 1120,
    "realtime_prefill_tokens_total": 576,
    "realtime_cached_tokens_total": 64,
    "decode_graph_passes_total": 80,
    "decode_eager_passes_total": 0,
    "prefill_graph_passes_total": 0,
    "prefill_eager_passes_total": 8,
}
"""The totals of the run that the samples show: 32 requests of 36 tokens, 1 by the prefill and 35 by 10 rounds."""


def info(name: str = "server_info", release: str = "0.5.21", version: str | None = None, **changed: Any) -> bytes:
    told = json.loads(sample(release, f"{name}.json"))
    told["version"] = version or told["version"]
    return json.dumps(told | changed).encode()


def observed(text: str, release: str, name: str = "server_info", **changed: Any) -> Observation:
    """Of the Prometheus text `text` of a release, on a server that says it is that one; without /v1/loads."""
    source = release if (SAMPLES / release / f"{text}.txt").exists() else "0.5.16"
    told = info(name, version=release, **changed)
    return interpret({INFO: told, METRICS: sample(source, f"{text}.txt"), LOADS: Unanswered("/v1/loads: status 404")})


@pytest.mark.parametrize("release", TEXTS)
def test_totals_of_a_run_on_two_tensor_parallel_ranks_count_each_once(release: str) -> None:
    after = observed("prometheus", release)
    assert {name: after.values[name] for name in RUN} == RUN
    assert after.release == release and after.source == "sglang: /server_info, /metrics"


@pytest.mark.parametrize("release", TEXTS)
def test_ranks_that_serve_other_requests_are_summed(release: str) -> None:
    after = observed("prometheus_dp2", release, "server_info_dp2")
    assert {name: after.values[name] for name in RUN} == RUN
    assert after.values["running_requests"] == 8 and after.values["queued_requests"] == 0
    assert after.values["max_running_requests"] == 96


@pytest.mark.parametrize("release", TEXTS)
def test_every_tensor_parallel_rank_counts_a_retraction_and_it_is_one(release: str) -> None:
    after = observed("prometheus_retract", release)
    assert after.values["retractions_total"] == 2
    assert (after.values["running_requests"], after.values["queued_requests"]) == (4, 2)


@pytest.mark.parametrize("release", ["0.5.14", "0.5.16", "0.5.17"])
def test_a_counter_that_was_never_incremented_is_zero_where_the_release_has_it(release: str) -> None:
    before = observed("prometheus_before", release, "server_info_fresh")
    assert {name: before.values[name] for name in RUN} == dict.fromkeys(RUN, 0)
    cell = difference(before, observed("prometheus", release))
    assert {name: cell.values[name] for name in RUN} == RUN
    assert cell.values["decode_graph_share"] == 1


def test_a_counter_that_is_absent_is_not_zero_on_a_server_whose_release_is_not_told() -> None:
    pages = {INFO: Unanswered("/server_info: status 401"), METRICS: sample("0.5.16", "prometheus_before.txt")}
    before = interpret(pages)
    assert "generation_tokens_total" not in before.values and "release" in before.missing["generation_tokens_total"]
    after = interpret(pages | {METRICS: sample("0.5.17", "prometheus.txt")})
    assert after.values["generation_tokens_total"] == 1152 and after.release is None
    assert "before the cell" in difference(before, after).missing["generation_tokens_total"]


def test_a_server_that_does_not_speculate_has_no_rounds_rather_than_none() -> None:
    text = b"".join(
        line for line in sample("0.5.17", "prometheus.txt").splitlines(True) if b"spec_verify_calls" not in line
    )
    told = info(version="0.5.23", speculative_algorithm=None, speculative_num_draft_tokens=None)
    found = interpret({INFO: told, METRICS: text})
    for name in ("verify_calls_total", "accept_length_interval", "accept_length_lifetime", "verify_width"):
        assert found.missing[name] == "the server does not speculate"
    assert found.values["generation_tokens_total"] == 1152


def test_streamed_and_other_requests_are_parts_of_one_count() -> None:
    line = b'sglang:generation_tokens_total{engine_type="unified",is_streaming="%s",model_name="m"} %d\n'
    found = interpret({INFO: info(version="0.5.17"), METRICS: b"\n" + line % (b"true", 1152) + line % (b"false", 40)})
    assert found.values["generation_tokens_total"] == 1192


def test_the_gauge_of_graphs_is_never_believed() -> None:
    after = observed("prometheus", "0.5.17")
    assert b"sglang:is_cuda_graph{" in sample("0.5.17", "prometheus.txt")
    assert after.values["decode_graph_passes_total"] == 80
    assert not any("is_cuda_graph" in offer.key for offer in OFFERS)


def test_the_gauge_of_accept_length_is_that_of_an_interval_and_has_no_prefill_token() -> None:
    after = observed("prometheus", "0.5.17")
    assert after.values["accept_length_interval"] == 3.625 and after.values["accept_rate_interval"] == 0.175
    assert after.values["accept_length_lifetime"] == 3.5, "1120 tokens of rounds by 320 rounds"
    cell = difference(observed("prometheus_before", "0.5.17", "server_info_fresh"), after)
    assert not {name for name in (*cell.values, *cell.missing) if name.startswith("accept_length")}


def test_an_accept_length_before_the_first_report_is_missing_and_not_zero() -> None:
    before = observed("prometheus_before", "0.5.17", "server_info_fresh")
    for name in ("accept_length_interval", "accept_rate_interval", "accept_length_lifetime"):
        assert name not in before.values and "40 decode steps" in before.missing[name]


def test_lifetime_averages_of_ranks_that_differ_have_no_mean() -> None:
    found = observed("prometheus_dp2", "0.5.17", "server_info_dp2")
    assert found.missing["accept_length_lifetime"].startswith("the data-parallel ranks differ (3.25, 3.75)")
    assert found.values["accept_length_interval"] == 3.5, "both ranks say so"


def test_an_average_that_is_null_or_a_list_with_nulls_is_missing() -> None:
    for odd in (None, [None, 3.5], "3.5", float("nan")):
        states = [{"avg_spec_accept_length": odd}]
        found = interpret({INFO: info(internal_states=states), METRICS: Unanswered("/metrics: status 404")})
        assert "40 decode steps" in found.missing["accept_length_lifetime"]


def test_graph_memory_is_told_by_pass_from_0_5_17_only() -> None:
    old = interpret({INFO: info(release="0.5.14"), METRICS: Unanswered("/metrics: status 404")})
    assert old.missing["verify_graph_memory_gb"] == ("SGLang 0.5.14 does not tell it; offered by 0.5.17 to 0.5.23")
    for release in ("0.5.17", "0.5.19", "0.5.20", "0.5.21"):
        new = interpret({INFO: info(release=release), METRICS: Unanswered("/metrics: status 404")})
        assert new.values["verify_graph_memory_gb"] == 1.25 and new.release == release


def test_what_no_release_counts_is_missing_with_the_reason() -> None:
    found = observed("prometheus", "0.5.17")
    assert "no release of SGLang" in found.missing["accepted_drafts_total"]
    assert "verify_calls_total x (verify_width - 1)" in found.missing["proposed_drafts_total"]
    assert found.values["verify_width"] == 16


@pytest.mark.parametrize("release", ["0.5.14", "0.5.16", "0.5.17", "0.5.20"])
def test_loads_are_newer_than_the_gauges_and_come_first(release: str) -> None:
    loads = json.loads(sample(release, "v1_loads.json"))
    rank = loads["loads"][0]
    loads["loads"] = [rank | {"num_running_reqs": 3, "num_waiting_reqs": 1}, rank | {"dp_rank": 1}]
    found = interpret(
        {INFO: info(), METRICS: sample("0.5.17", "prometheus_retract.txt"), LOADS: json.dumps(loads).encode()}
    )
    assert (found.values["running_requests"], found.values["queued_requests"]) == (7, 1)


def test_a_server_without_metrics_still_tells_its_load_and_says_how_to_have_the_rest() -> None:
    found = interpret(
        {
            INFO: info(version="0.5.20"),
            METRICS: Unanswered("/metrics: status 404"),
            LOADS: sample("0.5.20", "v1_loads.json"),
        }
    )
    assert found.values["running_requests"] == 4
    assert found.missing["generation_tokens_total"].endswith("404 (start the server with --enable-metrics)")


@pytest.mark.parametrize("text", ["0.5.13", "0.4.9.post2", "v0.5.0"])
def test_an_older_release_is_refused_with_the_reason(text: str) -> None:
    found = observed("prometheus", text)
    assert found.values == {} and set(found.missing) == {*TOTALS, *MOMENTS}
    assert found.missing["generation_tokens_total"] == (
        f"SGLang {text} is older than the releases whose names are known; 0.5.14 to 0.5.23 are known"
    )


def test_a_newer_release_is_read_as_the_newest_and_marked() -> None:
    found = observed("prometheus", "0.6.1")
    assert found.values["generation_tokens_total"] == 1152
    assert found.notes == ("SGLang 0.6.1 is newer than 0.5.23 and is read by the names of that one",)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.5.15.post1", (0, 5, 15)),
        ("0.5.23+ddtree", (0, 5, 23)),
        ("0.5.24rc1", (0, 5, 23)),
        ("0.0.0.dev1+g12ab", None),
        ("main", None),
        (None, None),
    ],
)
def test_versions_as_they_are_written(text: str | None, number: tuple[int, int, int] | None) -> None:
    release = release_of(text)
    assert release.number == number and not release.refused
    assert (release.note is None) == (number is not None and text != "0.5.24rc1")


def test_releases_before_0_5_19_are_noted_to_tell_nothing_of_a_streamed_request() -> None:
    assert "return_spec_tokens_details (from 0.5.19)" in observed("prometheus", "0.5.18").notes[0]
    assert observed("prometheus", "0.5.19").notes == ()


@pytest.mark.parametrize("release", ["0.5.14", "0.5.19", "0.5.21"])
def test_an_answers_details_have_the_names_of_the_table(release: str) -> None:
    told = json.loads(sample(release, "spec_details.json"))["generate_final_meta_info"]
    number = release_of(release).number
    assert number is not None
    keys = {one.key for one in offers(number, REQUEST_OFFERS) if one.place == "meta_info"}
    assert {key for key in told if key.startswith("spec_")} | {"num_retractions"} == keys
    assert told["spec_num_proposed_drafts"] == told["spec_verify_ct"] * (16 - 1)
    assert told["spec_accept_length"] == told["completion_tokens"] / told["spec_verify_ct"], "the prefill's token too"


def test_a_counter_that_fell_was_reset_and_nothing_of_that_cell_counts() -> None:
    before, after = observed("prometheus_retract", "0.5.17"), observed("prometheus_before", "0.5.17")
    after.values["requests_total"] = 50
    cell = difference(before, after)
    assert cell.values == {}
    assert cell.missing["requests_total"] == (
        "the server's counters were reset in between: prompt_tokens_total fell from 640 to 0"
    )


def test_another_start_is_seen_though_no_counter_fell() -> None:
    def at(requests: int, **started: object) -> Observation:
        text = f"# TYPE x gauge\nsglang:num_requests_total {requests}\n"
        told = {name: value for name, value in (json.loads(info()) | started).items() if value is not None}
        return interpret({INFO: json.dumps(told).encode(), METRICS: text.encode()})

    first = {"startup_time": {"total": 9.0}, "random_seed": 1}
    assert difference(at(3, **first), at(8, **first)).values["requests_total"] == 5
    only_seed = {"startup_time": None, "random_seed": 1}
    for before, after in (
        (first, first | {"startup_time": {"total": 99.9}}),
        (first, first | {"random_seed": 2}),
        (only_seed, only_seed | {"random_seed": 2}),
    ):
        cell = difference(at(3, **before), at(8, **after))
        assert cell.values == {} and "restarted in between: its start was " in cell.missing["requests_total"]
    nothing = {"startup_time": None, "random_seed": None}
    assert at(3, **nothing).started is None
    assert difference(at(3, **nothing), at(8)).values["requests_total"] == 5, "what was not told is no other start"


@pytest.mark.parametrize("release", ["0.5.14", "0.5.17", "0.5.21"])
def test_every_release_tells_something_of_its_start(release: str) -> None:
    told = json.loads(sample(release, "server_info.json"))
    one, other = (interpret({INFO: json.dumps(told | {"random_seed": seed}).encode()}) for seed in (1, 2))
    assert one.started != other.started and None not in (one.started, other.started)
    again = interpret({INFO: json.dumps(told | {"random_seed": 1, "last_receive_tstamp": 9.0}).encode()})
    assert again.started == one.started, "only what belongs to the start counts"


def test_calls_go_to_the_server_itself_and_bring_only_the_key_they_were_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A proxy that refuses, and a .netrc for the server's host."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving({"/health": b"", "/server_info": b"{}"}) as site:
        assert api.health(site.base_url)
        assert api.server_info(site.base_url, {"Authorization": "Bearer key"}) == {}
        sent = [headers.get("Authorization") for _, headers in site.asked]
    assert sent == [None, "Bearer key"]


def test_another_version_is_a_restart() -> None:
    cell = difference(observed("prometheus_before", "0.5.17"), observed("prometheus", "0.5.20"))
    assert cell.values == {} and "its version was 0.5.17 and is 0.5.20" in cell.missing["generation_tokens_total"]


def test_the_share_of_graphs_is_that_of_the_cell() -> None:
    before = observed("prometheus", "0.5.17")
    after = observed("prometheus", "0.5.17")
    assert difference(before, after).missing["decode_graph_share"] == "no decode step in between"
    after.values["decode_graph_passes_total"] += 30
    after.values["decode_eager_passes_total"] += 10
    assert difference(before, after).values["decode_graph_share"] == 0.75


COUNTERS = {
    "requests_total": 4,
    "aborted_requests_total": 1,
    "failed_requests_total": 0,
    "prompt_tokens_total": 50,
    "cached_tokens_total": 10,
    "generation_tokens_total": 90,
    "rounds_total": 30,
    "verify_calls_total": 40,
    "accepted_drafts_total": 46,
    "proposed_drafts_total": 640,
    "running_requests": 2,
    "queued_requests": 3,
    "max_running_requests": 8,
    "kv_tokens_used": 120,
    "kv_tokens_total": 4096,
    "kv_regions_free": 7,
}


def embedded(counters: dict[str, int], start_id: str = "a") -> dict[str, bytes]:
    registry = CollectorRegistry()
    registry.register(EngineCollector("m", lambda: counters, lambda: 12.5))
    told = {
        "version": "0.1.0",
        "start_id": start_id,
        "speculative_algorithm": "DDTREE",
        "speculative_num_draft_tokens": 17,
        "internal_states": [{"avg_spec_accept_length": 86 / 40}],
        "counters": counters,
    }
    return {INFO: json.dumps(told).encode(), METRICS: generate_latest(registry)}


def test_the_embedded_engine_is_read_by_its_counters() -> None:
    found = interpret(embedded(COUNTERS))
    wanted = {name: value for name, value in COUNTERS.items() if name in (*TOTALS, *MOMENTS)}
    assert {name: found.values[name] for name in wanted} == wanted
    assert found.values["accept_length_lifetime"] == 2.15 and found.values["verify_width"] == 17
    assert found.source == "embedded: /server_info, /metrics" and found.release == "0.1.0" and found.started == "a"
    assert found.missing["retractions_total"] == "the embedded engine has no such number"
    assert not found.values.keys() & found.missing.keys()
    assert {*found.values, *found.missing} >= {*TOTALS, *MOMENTS}


def test_the_embedded_engines_text_says_the_same_as_its_counters() -> None:
    by_text = interpret(embedded(COUNTERS) | {INFO: Unanswered("/server_info: status 404")})
    by_counters = interpret(embedded(COUNTERS))
    shared = [name for name in by_text.values if name in COUNTERS]
    assert len(shared) == 8
    assert {name: by_text.values[name] for name in shared} == {name: by_counters.values[name] for name in shared}


def test_the_embedded_engines_totals_have_differences_and_its_moments_none() -> None:
    later = COUNTERS | {"generation_tokens_total": 190, "accepted_drafts_total": 96, "running_requests": 0}
    cell = difference(interpret(embedded(COUNTERS)), interpret(embedded(later)))
    assert cell.values["generation_tokens_total"] == 100 and cell.values["accepted_drafts_total"] == 50
    assert "running_requests" not in cell.values and "kv_tokens_total" not in cell.values
    restarted = difference(interpret(embedded(COUNTERS)), interpret(embedded(later, "b")))
    assert restarted.values == {} and "its start was a and is b" in restarted.missing["generation_tokens_total"]


def test_an_endpoint_that_offers_nothing_is_all_missing_with_the_reason() -> None:
    with serving({}) as site:
        found = observe(site.base_url, timeout_s=5)
    assert found.values == {} and found.release is None and found.source == ""
    assert set(found.missing) == {*TOTALS, *MOMENTS}
    assert found.missing["generation_tokens_total"] == "/server_info: status 404; /metrics: status 404"
    cell = difference(found, found)
    assert cell.values == {} and cell.missing["requests_total"] == found.missing["requests_total"]


def test_pages_of_another_server_are_not_taken_for_ours() -> None:
    vllm = {"/metrics": b"# TYPE vllm:x gauge\nvllm:num_requests_running 3\n", "/server_info": b'{"vllm_config": 1}'}
    for pages in (vllm, {"/metrics": b"<html>", "/server_info": b"[1]"}, {"/metrics": b"\xff{", "/server_info": b"{"}):
        with serving(pages) as site:
            found = observe(site.base_url, timeout_s=5)
        assert found.values == {} and found.missing["requests_total"]


def test_a_text_that_is_none_costs_its_values_and_no_more() -> None:
    found = interpret({INFO: info(), METRICS: b"\nsglang:num_requests_total{ 3\n"})
    assert found.missing["requests_total"].startswith("/metrics: no Prometheus text")
    assert found.values["accept_length_lifetime"] == 3.5


def test_a_server_that_is_silent_or_gone_is_asked_once() -> None:
    with serving({}, silent=frozenset({"/server_info"})) as site:
        found = observe(site.base_url, timeout_s=0.2)
        assert [path for path, _ in site.asked] == ["/server_info"]
    assert found.missing["requests_total"].startswith("/server_info: no answer within 0.2 s")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    refused = "/server_info: no connection (Connection refused)"
    assert observe(url, timeout_s=5).missing["requests_total"] == refused


def test_headers_go_with_every_call_over_one_connection() -> None:
    pages = {"/server_info": info(), "/metrics": sample("0.5.17", "prometheus.txt")}
    with serving(pages | {"/v1/loads": sample("0.5.20", "v1_loads.json")}) as site:
        found = observe(f"{site.base_url}/", timeout_s=5, headers={"Authorization": "Bearer k"})
        assert [path for path, _ in site.asked] == [INFO, METRICS, LOADS]
        assert {headers["Authorization"] for _, headers in site.asked} == {"Bearer k"}
        assert site.connections == 1
    assert found.source == "sglang: /server_info, /metrics, /v1/loads"


def test_a_page_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_bench.servers.pages.MAX_BYTES", 1000)
    with serving({"/metrics": b"x" * 5000}) as site, Pages(site.base_url, 5) as pages, pytest.raises(Unanswered):
        pages.get("/metrics")


@pytest.mark.parametrize(
    "path", sorted(SAMPLES.glob("*/prometheus*.txt")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_one_metric_picked_from_a_text_is_what_the_parser_finds(path: Any) -> None:
    text = path.read_bytes()
    found = prometheus_text.parse(text.decode())
    for name, series in found.items():
        assert prometheus_text.pick(text, name) == series, name
    assert prometheus_text.pick(text, "sglang:num_running") == []


def test_a_line_feed_or_brace_in_a_label_is_no_end_of_it() -> None:
    text = b'a{x="1\\nb 2",y="}"} 3\nb 4\n'
    assert [one.value for one in prometheus_text.pick(text, "b")] == [4]
    (one,) = prometheus_text.pick(text, "a")
    assert one.value == 3 and one.labels["y"] == "}"
