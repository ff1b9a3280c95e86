"""The round log: off by default, and one line a batched round that agrees with what was committed."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest
from engine_server import chat_ids

from ddtree_reference import round_log
from ddtree_reference.answer import Update
from ddtree_reference.decode import Round, StageTimes
from ddtree_reference.method import Method
from ddtree_reference.round_log import RoundLog
from ddtree_reference.startup import Opened
from ddtree_reference.tree import Tree
from ddtree_reference.worker import Job, Worker

TIMES = StageTimes(0.001, 0.002, 0.003, 0.004, 0.005)


def test_a_round_is_the_sum_of_its_sequences() -> None:
    bushy = Tree((-1, 0, 0, 1), (0, 1, 1, 2), (0, 0, 1, 0))
    rounds = [Round((5, 6, 7), 2, 4, bushy), Round((5,), 0, 4, bushy), Round((5,), 1, 4, bushy)]
    line = round_log.describe(rounds, TIMES)
    assert line == {
        "sequences": 3,
        "rows": 12,
        "committed": 5,
        "accept_histogram": [1, 1, 1],
        "nodes": 9,
        "branching_nodes": 3,
        "depth": 2,
        "seconds": {"draft": 0.001, "head_topk": 0.002, "tree": 0.003, "verify": 0.004, "commit": 0.005},
    }


def test_a_chain_has_its_length_as_depth_and_ar_has_none() -> None:
    chain = round_log.describe([Round((1, 2), 1, 8)], TIMES)
    assert (chain["depth"], chain["nodes"], chain["branching_nodes"]) == (7, 7, 0)
    plain = round_log.describe([Round((1,), 0, 1)], TIMES)
    assert (plain["depth"], plain["nodes"], plain["accept_histogram"]) == (0, 0, [1])


@pytest.mark.parametrize("method", [Method("AR"), Method("DDTREE", budget=4)], ids=lambda method: method.algorithm)
def test_every_round_of_a_server_is_logged(toy: Opened, tmp_path: Path, method: Method) -> None:
    path = tmp_path / "deep" / "rounds.jsonl"
    ends: queue.Queue[Update] = queue.Queue()
    worker = Worker(toy.engine, toy.tokenizer, method, round_log=RoundLog(path))
    for prompt in ("hello", "Write a poem", "2+2"):
        emit = lambda update: ends.put(update) if update.last else None  # noqa: E731
        worker.submit(Job(prompt, tuple(chat_ids(toy, prompt)), 20, None, (), emit))
    worker.start()
    updates = [ends.get(timeout=30) for _ in range(3)]
    counters = worker.snapshot()
    worker.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == counters["rounds_total"]
    assert sum(line["committed"] for line in lines) == 3 * 20 - 3, "the first token of each comes with its prompt"
    assert max(line["sequences"] for line in lines) == 3
    assert all(len(line["accept_histogram"]) <= 8 for line in lines)
    assert sum(sum(line["accept_histogram"]) for line in lines) == sum(line["sequences"] for line in lines)
    if method.algorithm == "DDTREE":
        rounds = [update.spec["spec_verify_ct"] for update in updates if update.spec is not None]
        assert sum(rounds) == sum(line["sequences"] for line in lines)
        assert all(line["nodes"] == 4 * line["sequences"] for line in lines)
        assert all(min(line["seconds"].values()) > 0 for line in lines)


def test_a_log_that_cannot_be_written_ends_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    log = RoundLog(Path("/dev/full"))
    log.write([Round((1,), 0, 1)], TIMES, 0)
    log.write([Round((1,), 0, 1)], TIMES, 0)
    assert caplog.text.count("no more rounds are logged") == 1
