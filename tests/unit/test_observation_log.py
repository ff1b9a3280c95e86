"""SGLang's log lines. The samples under sglang/ were written by each release's own format strings; numbers invented."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pages_server import sample

from ddtree_bench.servers.log_lines import (
    CAPTURES,
    DECODE,
    PREFILL,
    RETRACTIONS,
    WHY_NOT_LOGGED,
    cell_log,
    log_size,
    log_summary,
    parse_log,
)
from ddtree_bench.servers.sglang_releases import LOG_OFFERS


def log(release: str, name: str) -> str:
    return sample(release, f"{name}.txt").decode()


@pytest.mark.parametrize("release", ["0.5.14", "0.5.16", "0.5.22"])
def test_a_run_as_each_format_logs_it(release: str) -> None:
    found = parse_log(log(release, "decode_log"))
    decode = found.decode
    assert decode["accept_length"].tolist() == [3.38, 3.62] and decode["accept_rate"].tolist() == [0.16, 0.17]
    assert decode["running"].tolist() == [4, 4] and decode["queued"].tolist() == [0, 0]
    assert decode["tokens"].tolist() == [172, 172] and decode["cuda_graph"].tolist() == [True, True]
    assert decode["gen_throughput_tok_s"].tolist() == [1080.0, 1160.0]
    assert decode["time"].tolist() == [pd.Timestamp("2026-11-30 10:00:21"), pd.Timestamp("2026-11-30 10:00:22")]
    assert decode["tp_rank"].tolist() == [0, 0] and decode["dp_rank"].isna().all()
    (prefill,) = found.prefill.to_dict("records")
    assert (prefill["new_requests"], prefill["new_tokens"], prefill["cached_tokens"]) == (4, 72, 8)
    assert prefill["cuda_graph"] is False and prefill["input_throughput_tok_s"] == 9.31
    begin, end = found.captures.to_dict("records")
    assert (begin["model"], begin["stage"], begin["event"], begin["width"]) == ("target", "verify", "begin", 16)
    assert (end["event"], end["elapsed_s"], end["memory_gb"]) == ("end", 3.02, 1.25)
    sizes = (end if release == "0.5.22" else begin)["batch_sizes"]
    assert sizes == "1, 2, 4, 8, 12, 16, 24, 32, 40, 48"
    assert log_summary(found) == {
        "decode_lines": 2,
        "cuda_graph_line_share": 1.0,
        "logged_accept_length_mean": 3.5,
        "running_max": 4,
        "retracted_requests": 0,
        "verify_width": 16,
    }


@pytest.mark.parametrize("release", ["0.5.14", "0.5.16", "0.5.22"])
def test_ranks_are_read_from_the_prefix(release: str) -> None:
    decode = parse_log(log(release, "decode_log_dp2")).decode
    assert decode["dp_rank"].tolist() == [0, 0] and decode["tp_rank"].tolist() == [0, 0]


def test_a_server_that_does_not_speculate_logs_no_accept_length() -> None:
    found = parse_log(log("0.5.14", "decode_log_ar"))
    assert found.decode["accept_length"].isna().all() and found.decode["gen_throughput_tok_s"].tolist() == [320.0]
    assert log_summary(found)["logged_accept_length_mean"] is None


def test_a_retraction_that_all_ranks_log_is_one() -> None:
    one = log("0.5.14", "failure_log")
    assert parse_log(one).retractions[["requests", "tokens_gained"]].values.tolist() == [[2, 90]]
    twice = parse_log(one + one.replace(" TP0]", " TP1]"))
    assert len(twice.retractions) == 2 and log_summary(twice)["retracted_requests"] == 2
    ranks = parse_log(one.replace(" TP0]", " DP0 TP0]") + one.replace(" TP0]", " DP1 TP1]"))
    assert log_summary(ranks)["retracted_requests"] == 4, "those of other requests are summed"


def test_a_retraction_that_all_stages_of_a_pipeline_log_is_one() -> None:
    one = log("0.5.14", "failure_log")
    stages = parse_log(one.replace(" TP0]", " PP0 TP0]") + one.replace(" TP0]", " PP1 TP0]"))
    assert stages.retractions["pp_rank"].tolist() == [0, 1]
    assert log_summary(stages)["retracted_requests"] == 2


@pytest.mark.parametrize("release", ["0.5.14", "0.5.16", "0.5.22"])
def test_the_log_of_a_cell_is_what_was_written_meanwhile(release: str, tmp_path: Path) -> None:
    text = sample(release, "decode_log.txt")
    path = tmp_path / "server.log"
    begin = text.rindex(b"\n", 0, text.index(b"Prefill batch")) + 1
    path.write_bytes(text[:begin])
    assert log_size(path) == begin
    path.write_bytes(text + text[begin:])  # the cell, and the one after it
    found = cell_log(path, begin, len(text))
    assert found == {
        "values": {
            "decode_lines": 2,
            "cuda_graph_line_share": 1.0,
            "logged_accept_length_mean": 3.5,
            "running_max": 4,
            "retracted_requests": 0,
            "verify_width": 16,
        },
        "missing": {},
    }
    assert cell_log(path, begin)["values"]["decode_lines"] == 4
    assert set(found["values"]) == {one.name for one in LOG_OFFERS} == set(WHY_NOT_LOGGED)


def test_a_cell_whose_log_says_nothing_says_why(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    assert log_size(path) == log_size(None) == 0
    reasons = {
        None: "the server was not started here, so its log is not to be had",
        path: "the server's log cannot be read: No such file or directory",
    }
    for where, reason in reasons.items():
        assert cell_log(where, 0) == {"values": {}, "missing": dict.fromkeys(WHY_NOT_LOGGED, reason)}
    path.write_text("INFO: ready\n")
    assert set(cell_log(path, 0)["missing"].values()) == {
        "the server logged no batch that is known while the cell was measured"
    }
    path.write_bytes(sample("0.5.14", "decode_log_ar.txt"))
    found = cell_log(path, 0)
    assert found["values"]["decode_lines"] == 1
    assert set(found["missing"]) == {"logged_accept_length_mean", "verify_width"}


def test_lines_in_other_shapes() -> None:
    found = parse_log(
        "host python[7]: [2026-11-30 10:00:21.250 DP1 PP0 TP3] Decode batch [812], #running-req: 9, #full token: 70, "
        "full token usage: 0.51, mamba num: 3, mamba usage: 0.02, accept len: 2.00, accept rate: 0.07, cap len: 3.10, "
        "cpu graph: False, gen throughput (token/s): 12.50, #queue-req: 6, fwd occupancy: 81.2%\n"
        "Decode batch, #running-req: 1, #token: 5, token usage: 0.00, cuda graph: True, gen throughput (token/s): inf\n"
        "[2026-11-30 10:00:22] INFO: something else\n\x1b[31mDecode batch of another kind\x1b[0m\n"
        "[2026-11-30 10:00:23 TP0] Testing retraction. KV cache pool is full. Retract requests. #retracted_reqs: 1\n"
    )
    first, second = found.decode.to_dict("records")
    assert (first["dp_rank"], first["tp_rank"], first["running"], first["queued"]) == (1, 3, 9, 6)
    assert (first["tokens"], first["token_usage"], first["accept_length"]) == (70, 0.51, 2.0)
    assert first["cuda_graph"] is False and first["time"] == pd.Timestamp("2026-11-30 10:00:21.250")
    assert second["running"] == 1 and second["time"] is pd.NaT and pd.isna(second["gen_throughput_tok_s"])
    assert found.retractions["requests"].tolist() == [1]
    assert log_summary(found)["cuda_graph_line_share"] == 0.5


def test_a_cells_share_of_a_log() -> None:
    found = parse_log(log("0.5.14", "decode_log")).between(
        pd.Timestamp("2026-11-30 10:00:22"), pd.Timestamp("2026-11-30 10:00:30")
    )
    assert found.decode["accept_length"].tolist() == [3.62]
    assert len(found.prefill) == 0 and log_summary(found)["verify_width"] is None


def test_a_log_without_such_lines_has_empty_frames() -> None:
    found = parse_log("nothing\n\n")
    frames = (found.decode, found.prefill, found.retractions, found.captures)
    for frame, shape in zip(frames, (DECODE, PREFILL, RETRACTIONS, CAPTURES), strict=True):
        assert len(frame) == 0 and list(frame) == list(shape)
    assert log_summary(found) == {
        "decode_lines": 0,
        "cuda_graph_line_share": None,
        "logged_accept_length_mean": None,
        "running_max": None,
        "retracted_requests": 0,
        "verify_width": None,
    }
