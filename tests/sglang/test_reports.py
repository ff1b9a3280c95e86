"""Reports of a DDTREE server: the round log, Prometheus counters, meta_info, sglext and the server's log agree."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from lossless import greedy, prompts
from sglang_server import SGLangServer
from trained_models import ModelPair

pytestmark = pytest.mark.sglang

BUDGET = 12  # above the block of 8, so that rows, nodes and drafts cannot be mistaken for each other
DEPTH = 7
LENGTHS = (24, 5, 40, 17)
STAGES = {"draft", "head_topk", "tree", "verify", "commit"}


class Run(NamedTuple):
    """What a server said of a few requests; lines and counters include those before them (warm-up)."""

    answers: list[dict[str, Any]]
    completion: dict[str, Any]
    seconds: float
    meta: dict[str, Any]
    lines: list[dict[str, Any]]
    counters: dict[str, float]
    log: str

    def of(self, answer: dict[str, Any]) -> list[dict[str, int]]:
        """The rounds of one request, as the round log has them."""
        rid = answer["meta_info"]["id"]
        rounds = []
        for line in self.lines:
            columns = line["requests"]
            rounds += [
                {name: values[n] for name, values in columns.items() if name != "rid"}
                for n, found in enumerate(columns["rid"])
                if found == rid
            ]
        return rounds


@pytest.fixture(scope="module")
def run(plain_model: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("reports")
    path = folder / "made" / "rounds.jsonl"
    with SGLangServer(
        plain_model.target,
        drafter_path=plain_model.drafter,
        algorithm="DDTREE",
        budget=BUDGET,
        extra_args=[
            *("--enable-metrics", "--decode-log-interval", "1", "--max-running-requests", "8"),
            *("--speculative-ddtree-round-log", str(path)),
        ],
        log_path=folder / "log",
    ) as server:
        started = time.monotonic()
        answers = server.generate(
            input_ids=prompts(plain_model.target, len(LENGTHS)), sampling_params=[greedy(n) for n in LENGTHS]
        )
        body = {"model": "any", "prompt": [70, 71, 72], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        completion = server.post("/v1/completions", {**body, "return_spec_tokens_details": True}).json()
        seconds = time.monotonic() - started
        counters = settled_counters(server)
        meta, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        yield Run(answers, completion, seconds, meta["meta"], lines, counters, server.log())


def settled_counters(server: SGLangServer) -> dict[str, float]:
    """The values of GET /metrics with our names, by name and what tells series apart; once no more rounds come.

    The last request's answer is sent before the round that overlap scheduling had begun for it is counted.
    """
    found: dict[str, float] = {}
    while True:
        last, found = found, {}
        for line in server.get("/metrics").text.splitlines():
            named = re.match(r"sglang:ddtree_(\w+){(.*)} (\S+)", line)
            if named:
                label = re.search(r'(?:stage|le)="([^"]*)"', named[2])
                found[named[1] + (f":{label[1]}" if label else "")] = float(named[3])
                assert 'model_name="' in named[2]
        if found and found == last:
            return found
        time.sleep(0.5)


def histogram(values: list[int]) -> list[int]:
    counted = Counter(values)
    return [counted[k] for k in range(max(values) + 1)]


def test_the_log_says_first_what_is_served(run: Run, plain_model: ModelPair) -> None:
    assert run.meta["model"] == str(plain_model.target)
    widths = {"budget": BUDGET, "topk_cap": BUDGET, "block": DEPTH + 1, "verify_width": BUDGET + 1}
    assert run.meta.items() >= widths.items()
    assert run.meta["sglang"] == "0.5.23"


def test_every_round_of_a_request_is_in_the_log_and_adds_up_to_its_meta_info(run: Run) -> None:
    assert sum(run.answers[n]["meta_info"]["spec_num_correct_drafts"] for n in range(len(LENGTHS))) > 10
    for answer, tokens in zip(run.answers, LENGTHS, strict=True):
        info, rounds = answer["meta_info"], run.of(answer)
        accepted = [r["accepted"] for r in rounds]
        assert len(rounds) == info["spec_verify_ct"]
        assert sum(accepted) == info["spec_num_correct_drafts"]
        assert histogram(accepted) == info["spec_correct_drafts_histogram"]
        assert sum(r["committed"] for r in rounds) + 1 == info["completion_tokens"] == tokens  # 1: from prefill
        assert all(r["accepted"] <= r["depth"] <= DEPTH for r in rounds)
        assert all(1 <= r["committed"] <= r["accepted"] + 1 for r in rounds)


def test_a_round_proposes_the_budget_in_meta_info(run: Run) -> None:
    for answer in run.answers:
        info = answer["meta_info"]
        assert info["spec_num_proposed_drafts"] == BUDGET * info["spec_verify_ct"]
        assert info["spec_accept_rate"] == info["spec_num_correct_drafts"] / info["spec_num_proposed_drafts"]
        assert info["spec_accept_length"] == info["completion_tokens"] / info["spec_verify_ct"]


def test_sglext_has_the_same_details(run: Run) -> None:
    details = run.completion["sglext"]["spec_tokens_details"]
    rounds = run.of({"meta_info": {"id": run.completion["id"]}})
    assert details["spec_verify_ct"] == len(rounds) > 0
    assert details["spec_num_proposed_drafts"] == BUDGET * len(rounds)
    assert details["spec_num_correct_drafts"] == sum(r["accepted"] for r in rounds)


def test_a_lines_sums_are_those_of_its_requests(run: Run) -> None:
    for line in run.lines:
        requests = line["requests"]
        batch = len(requests["rid"])
        assert line["sequences"] == batch
        assert line["rows"] == (batch + line["discarded"]) * (BUDGET + 1)
        assert line["nodes"] == batch * BUDGET
        assert line["committed"] == sum(requests["committed"])
        assert line["branching_nodes"] == sum(requests["branching_nodes"])
        assert line["cuda_graph"] is False
        if batch:
            assert line["accept_histogram"] == histogram(requests["accepted"])
            assert line["depth"] == max(requests["depth"])
    # A budget above the deepest path cannot be a chain.
    assert all(n > 0 for line in run.lines for n in line["requests"]["branching_nodes"])
    assert max(line["sequences"] for line in run.lines) == len(LENGTHS)


def test_overlap_computes_a_round_for_requests_that_have_ended(run: Run) -> None:
    assert sum(line["discarded"] for line in run.lines) >= len(LENGTHS) / 2


def test_counters_are_the_sums_of_the_log(run: Run) -> None:
    totals = {
        "rounds_total": len(run.lines),
        "request_rounds_total": sum(line["sequences"] for line in run.lines),
        "discarded_request_rounds_total": sum(line["discarded"] for line in run.lines),
        "nodes_total": sum(line["nodes"] for line in run.lines),
        "branching_nodes_total": sum(line["branching_nodes"] for line in run.lines),
        "accepted_drafts_total": sum(sum(line["requests"]["accepted"]) for line in run.lines),
        "committed_tokens_total": sum(line["committed"] for line in run.lines),
    }
    assert {name: run.counters[name] for name in totals} == totals
    accepted = [a for line in run.lines for a in line["requests"]["accepted"]]
    for k in range(DEPTH + 1):
        assert run.counters[f"accepted_drafts_per_round_bucket:{k}.0"] == sum(a <= k for a in accepted)
    for stage in STAGES:
        logged = sum(line["seconds"][stage] for line in run.lines)
        assert run.counters[f"stage_seconds_total:{stage}"] == pytest.approx(logged, abs=1e-6 * len(run.lines))


def test_stage_times_are_positive_and_no_more_than_the_wall_time(run: Run) -> None:
    assert all(line["seconds"].keys() == STAGES for line in run.lines)
    assert all(value > 0 for line in run.lines for value in line["seconds"].values())
    measured = sum(sum(line["seconds"].values()) for line in run.lines if line["sequences"])
    assert 0.3 * run.seconds < measured < run.seconds


def test_the_servers_own_line_has_the_accept_length_and_rate_of_the_round(run: Run) -> None:
    printed = re.findall(r"Decode batch.* accept len: ([\d.]+), accept rate: ([\d.]+)", run.log)
    assert len(printed) >= len(run.lines) - 1
    compared = 0
    for (length, rate), line in zip(printed, run.lines, strict=False):
        if line["discarded"] == 0:  # SGLang counts the requests that had ended too
            accepted = line["requests"]["accepted"]
            assert float(length) == pytest.approx(sum(accepted) / len(accepted) + 1, abs=0.006)
            assert float(rate) == pytest.approx(sum(accepted) / line["nodes"], abs=0.006)
            compared += 1
    assert compared > 10
