import json

import pytest

from sglang_ddtree.options import OptionError
from sglang_ddtree.round_log import RoundLog
from sglang_ddtree.rounds import RequestRound, Round, describe

REQUESTS = [
    RequestRound("a", accepted=2, committed=3, branching_nodes=1, depth=4),
    RequestRound("b", accepted=0, committed=1, branching_nodes=2, depth=3),
    RequestRound("c", accepted=2, committed=1, branching_nodes=0, depth=5),
]
SECONDS = {"draft": 0.25, "tree": 0.125, "verify": 0.5, "commit": 0.0625}
ROUND = Round(REQUESTS, discarded=1, budget=5, cuda_graph=True, seconds=SECONDS)


def test_sums_are_over_the_requests_that_count_and_rows_over_all():
    assert describe(ROUND) == {
        "sequences": 3,
        "discarded": 1,
        "rows": 24,
        "committed": 5,
        "accept_histogram": [1, 0, 2],
        "nodes": 15,
        "branching_nodes": 3,
        "depth": 5,
        "cuda_graph": True,
        "seconds": SECONDS,
        "requests": {
            "rid": ["a", "b", "c"],
            "accepted": [2, 0, 2],
            "committed": [3, 1, 1],
            "branching_nodes": [1, 2, 0],
            "depth": [4, 3, 5],
        },
    }


def test_a_round_of_ended_requests_alone_is_one_with_rows_but_no_numbers():
    found = describe(Round([], discarded=2, budget=5, cuda_graph=False, seconds={}))
    assert (found["rows"], found["sequences"], found["nodes"], found["depth"]) == (12, 0, 0, 0)
    assert found["accept_histogram"] == []


def test_the_log_is_appended_to_and_every_start_says_what_it_is(tmp_path):
    path = tmp_path / "new folder" / "rounds.jsonl"
    for start in (1, 2):
        log = RoundLog(str(path), {"budget": 5, "start": start}, {"dp_rank": 3})
        log(ROUND)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["meta"]["start"] for line in lines[::2]] == [1, 2]
    assert all(line["meta"].keys() == {"time", "pid", "budget", "start"} for line in lines[::2])
    for line in lines[1::2]:
        assert line.pop("time") > 0
        assert line == {**describe(ROUND), "dp_rank": 3}


def test_a_path_that_cannot_be_written_names_option_path_and_remedy(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=r"round-log .*cannot be written.*give a path") as error:
            RoundLog(str(path), {}, {})
        assert str(path) in str(error.value)


def test_a_log_that_fills_the_disk_ends_and_serving_goes_on(tmp_path, caplog):
    log = RoundLog(str(tmp_path / "rounds.jsonl"), {}, {})
    log._file.close()
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115
    log(ROUND)
    log(ROUND)
    assert caplog.text.count("--speculative-ddtree-round-log") == 1
