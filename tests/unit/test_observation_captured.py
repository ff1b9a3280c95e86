"""What a live SGLang 0.5.23 answered, as it is read: sglang/0.5.23 was captured (sglang/README.md)."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pandas as pd
import pytest
from pages_server import SAMPLES, sample

from ddtree_bench import metrics
from ddtree_bench.load import requests_table
from ddtree_bench.load.exchange import Exchange
from ddtree_bench.load.prompts import Prompt
from ddtree_bench.load.requests_table import Sent
from ddtree_bench.plan import Load
from ddtree_bench.servers.log_lines import log_summary, parse_log
from ddtree_bench.servers.observation import INFO, LOADS, METRICS, Observation, difference, interpret

METHODS = ("ar", "dflash", "ddtree")
TOKENS = 64 + 64 + 24 + 24 + 48 + 16 * 64
"""Of the requests between the two looks: one, the same streamed, two chats, one of /generate, 16 four at a time."""


def captured(method: str, name: str) -> bytes:
    return sample("0.5.23", f"{method}/{name}")


def observed(method: str, when: str = "") -> Observation:
    pages = {INFO: f"server_info{when}.json", METRICS: f"prometheus{when}.txt", LOADS: f"v1_loads{when}.json"}
    return interpret({page: captured(method, name) for page, name in pages.items()})


@pytest.mark.parametrize("method", METHODS)
def test_a_live_servers_pages_are_read(method: str) -> None:
    seen = observed(method)
    assert (seen.release, seen.source) == ("0.5.23", "sglang: /server_info, /metrics, /v1/loads")
    assert seen.notes == () and seen.started is not None
    assert seen.values["requests_total"] == 22 and seen.values["max_running_requests"] == 8
    assert seen.values["running_requests"] == 0 and seen.values["queued_requests"] == 0
    assert seen.values["decode_graph_passes_total"] == 0, "a CPU captures no graph"


@pytest.mark.parametrize("method", METHODS)
def test_the_tokens_of_the_cell_are_those_that_were_asked_for(method: str) -> None:
    cell = difference(observed(method, "_before"), observed(method))
    assert (cell.values["requests_total"], cell.values["generation_tokens_total"]) == (21, TOKENS)
    # What was computed and what came from the cache are all prompt tokens; health checks count as neither request.
    computed = cell.values["realtime_prefill_tokens_total"] + cell.values["realtime_cached_tokens_total"]
    assert computed == cell.values["prompt_tokens_total"] and cell.values["decode_graph_share"] == 0


def test_rounds_are_told_by_a_server_that_speculates_alone() -> None:
    cell = difference(observed("dflash", "_before"), observed("dflash"))
    rounds = cell.values["verify_calls_total"]
    assert rounds == 208
    # Bonus and drafts of every round, before the cut of each answer's last one.
    assert cell.values["realtime_decode_tokens_total"] == 1422 > TOKENS - 21
    assert observed("dflash").values["accept_length_interval"] == pytest.approx(6.2804, abs=1e-4)
    assert observed("dflash").values["accept_length_lifetime"] == pytest.approx(5.8912, abs=1e-4)
    assert "first comes after 40 decode steps" in observed("dflash", "_before").missing["accept_length_lifetime"]
    told = observed("ar").missing
    assert told["verify_calls_total"] == told["verify_width"] == "the server does not speculate"


def test_trees_are_told_by_a_ddtree_server_alone() -> None:
    cell = difference(observed("ddtree", "_before"), observed("ddtree")).values
    assert cell["tree_rounds_total"] == cell["verify_calls_total"] == 366
    assert cell["tree_nodes_total"] == cell["proposed_drafts_total"] == 366 * 8
    assert (cell["tree_branching_nodes_total"], cell["accepted_drafts_total"]) == (472, 898)
    stages = ("draft", "head_topk", "tree", "verify", "commit")
    seconds = [cell[f"{stage}_seconds_total"] for stage in stages]
    assert seconds == pytest.approx([91.467, 0.304, 31.859, 184.121, 0.608], abs=1e-3)
    for method in ("ar", "dflash"):
        told = observed(method).missing
        assert (
            told["tree_rounds_total"]
            == told["verify_seconds_total"]
            == ("the server has no trees: only DDTREE of our plugin does")
        )
        assert told["accepted_drafts_total"].startswith("no release of SGLang counts accepted drafts")


def of_cell(method: str, planned: str) -> dict[str, Any]:
    """metrics.json of a cell with the captured stream, on the server of `method` whose plan says `planned`."""
    counters = difference(observed(method, "_before"), observed(method))
    samples = pd.DataFrame(columns=["time", "running", "queued"], dtype=float)
    return metrics.document(streamed(method, "stream.txt"), Load(1), {}, samples, counters, 1, None, planned)


def test_the_trees_of_a_ddtree_cell_are_proven_by_the_servers_counters() -> None:
    cell = of_cell("ddtree", "DDTREE")
    assert (cell["tree_nodes_per_round"], cell["tree_is_chain"]) == (8, False)
    assert cell["tree_branching_nodes_per_round"] == pytest.approx(472 / 366) and cell["tree_max_depth"] is None
    (proof,) = (check for check in cell["checks"] if check["name"] == "tree_branches")
    assert proof["ok"] and proof["detail"] == "8.00 nodes a round, 1.29 with two children or more"
    without = of_cell("dflash", "DDTREE")
    assert without["tree_is_chain"] is None and without["tree_nodes_per_round"] is None


def streamed(method: str, name: str) -> pd.DataFrame:
    """The row of a captured stream, its bytes all read at once."""
    body = captured(method, name)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    exchange = Exchange(0.0, 0.0, 2.0, array("d", [1.0]), array("d", [0.0]), [head + body], None)
    row = requests_table.row(Sent(0, Prompt("p", 1, "c", "x"), 0, exchange), 64)
    return pd.DataFrame([row])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "tokens"), [("stream.txt", 64), ("chat_stream.txt", 24)])
def test_a_live_stream_is_ok_and_counts_its_tokens_event_by_event(method: str, name: str, tokens: int) -> None:
    found = streamed(method, name)
    row = found.iloc[0]
    assert (row["status"], row["finish_reason"], row["completion_tokens"]) == ("ok", "length", tokens)
    shared = 1 if (method, name) == ("ddtree", "stream.txt") else 0
    assert row["cached_prompt_tokens"] == shared, "told because the server was started with --enable-cache-report"
    told = [count for count in row["event_tokens"] if count is not None]
    assert told == sorted(told) and told[-1] == tokens
    (measured,) = metrics.request_metrics(found).to_dict("records")
    assert (measured["output_tokens"], measured["token_source"]) == (tokens, "usage")
    assert measured["n1"] == 1 and measured["n1_source"] == "usage"


def test_a_live_answers_rounds_and_drafts_make_up_its_tokens() -> None:
    (told,) = metrics.request_metrics(streamed("dflash", "stream.txt")).to_dict("records")
    assert (told["rounds"], told["accepted_drafts"], told["proposed_drafts"]) == (12, 54, 84)
    assert told["identity_holds"] and told["accept_length"] == (64 - 1) / 12
    assert told["accept_length_rounds"] == 1 + 54 / 12
    (plain,) = metrics.request_metrics(streamed("ar", "stream.txt")).to_dict("records")
    assert pd.isna(plain["rounds"])


def test_details_are_the_same_in_the_extension_and_in_meta_info() -> None:
    extension = json.loads(captured("dflash", "completion.json"))["sglext"]["spec_tokens_details"]
    meta = json.loads(captured("dflash", "generate.json"))["meta_info"]
    shared = {name for name in meta if name.startswith("spec_")}
    assert shared < set(extension)
    assert extension["spec_num_proposed_drafts"] == extension["spec_verify_ct"] * 7
    assert sum(k * n for k, n in enumerate(extension["spec_correct_drafts_histogram"])) == 55
    assert extension["spec_accept_length"] == pytest.approx(64 / 9), "the prefill's token too, so it is not used"
    assert "sglext" not in json.loads(captured("ar", "completion.json"))


@pytest.mark.parametrize(
    ("method", "lines", "length"), [("ar", 11, None), ("dflash", 2, (4.85 + 6.28) / 2), ("ddtree", 4, 3.7575)]
)
def test_a_live_log_is_read(method: str, lines: int, length: float | None) -> None:
    summary = log_summary(parse_log(captured(method, "decode_log.txt").decode()))
    assert summary["decode_lines"] == lines and summary["cuda_graph_line_share"] == 0
    assert summary["running_max"] == 4
    assert summary.get("logged_accept_length_mean") == (None if length is None else pytest.approx(length))


def test_no_sample_names_a_folder_of_the_machine_it_was_captured_on() -> None:
    paths = [path for method in METHODS for path in (SAMPLES / "0.5.23" / method).iterdir()]
    assert len(paths) == 36
    assert not [path for path in paths if b"/tmp/" in path.read_bytes() or b"/home/" in path.read_bytes()]
