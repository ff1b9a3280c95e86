"""A server that is up already: its cells are measured like any others, and it is left alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from clone import Clone, eventually
from engine_server import Server, end, launch

LAUNCHED = ("--model", "toy", "--served-model-name", "served-toy", "--max-running-requests", "4")
TREE = ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "4", "--speculative-ddtree-topk-cap", "4")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An embedded engine that somebody has started, outside every clone."""
    server = launch(tmp_path_factory.mktemp("endpoint") / "server.log", *LAUNCHED, *TREE)
    assert server.process.poll() is None, server.log.read_text()
    yield server
    end(server)


@pytest.fixture
def clone(endpoint: Server, tmp_path: Path) -> Iterator[Clone]:
    """A clone whose one target is the endpoint."""
    clone = Clone.make(tmp_path / "clone")
    target = {"launcher": "external", "engine": "reference", "url": f"{endpoint.url}/v1", "served_model": "served-toy"}
    clone.config["targets"] = {"theirs": target | {"flush_cache": True}}
    clone.config["workloads"]["first"]["slos"] = {"ttft_s": 30, "e2e_s": 60}
    clone.block.update(target="theirs", method="DDTREE", max_running_requests=4)
    yield clone
    for process in clone.processes():
        process.kill()


def rounds(endpoint: Server) -> int:
    return int(endpoint.get("/server_info").json()["counters"]["requests_total"])


def test_cells_of_an_endpoint_are_measured_kept_and_tabled(clone: Clone, endpoint: Server) -> None:
    clone.config["workloads"]["second"].update(open_loop_s=2, blocks=[2, 3])
    clone.config["sweep"].append({**clone.block, "workload": "second", "rate": 4, "concurrency": 3})
    output = clone.measure()
    assert "not confirmed by it: tp_size, ep_size" in output
    assert clone.starts() == set()
    views = clone.views()
    assert {name.split("-r1.")[0] for name in views} == {"first-c1", "second-q4-c3"}
    for view in views.values():
        assert (view["status"], view["aborted"], view["log_tail"]) == ("ok", None, None)
        assert view["environment"]["key"] == view["identity"]["server"]["environment"] == "external"
        assert view["read_back"]["not_confirmed"] == ["tp_size", "ep_size"]
        assert "speculative_ddtree_budget" in view["read_back"]["confirmed"]
        assert view["cache_not_flushed"] is None
        assert view["host"]["gpus"] is None and view["host"]["client"]["cpu"]["cores"] >= 1
    tables = clone.root / "results" / "tables"
    cells = pd.read_csv(tables / "cells.csv").set_index("workload")
    assert cells["load_kind"].to_dict() == {"first": "closed", "second": "open"}
    assert (cells.loc["second", "rate"], cells.loc["second", "arrivals"]) == (4.0, "poisson")
    assert cells["requests_ok"].to_dict() == {"first": 4, "second": 8}
    assert cells.loc["first", "slo_met"] == 4 and pd.isna(cells.loc["second", "slo_met"])
    assert cells.loc["second", "ttft_from_intended_mean_s"] >= cells.loc["second", "ttft_mean_s"]
    assert set(cells["not_confirmed"]) == {"tp_size ep_size"}
    assert not cells["counter_mismatch"].any()
    assert pd.read_csv(tables / "runs.csv")["gpu_count"].isna().all()
    assert set(pd.read_csv(tables / "speedup.csv")["comparison"]) == {"no_baseline"}
    assert pd.read_csv(tables / "crossovers.csv")["workload"].tolist() == ["first"]
    told = endpoint.get("/server_info").json()
    for view in views.values():
        assert set(view["server_info"]) <= set(told) and not {"internal_states", "counters"} & set(view["server_info"])
        assert view["server_info"]["start_id"] == told["start_id"] and view["ready_s"] is None
    before = rounds(endpoint)
    clone.config["workloads"]["first"]["slos"]["e2e_s"] = 1e-6
    clone.measure()
    assert pd.read_csv(tables / "cells.csv").set_index("workload").loc["first", "slo_met"] == 0
    assert rounds(endpoint) == before
    assert endpoint.process.poll() is None


def test_repeats_on_one_running_server_are_one_run(clone: Clone) -> None:
    clone.config["repeats"] = 3
    clone.measure()
    assert len({record["start_id"] for record in clone.records()}) == 1
    tables = clone.root / "results" / "tables"
    (budget,) = pd.read_csv(tables / "budget.csv").to_dict("records")
    assert (budget["n"], budget["n_repeats"]) == (1, 3)
    assert budget["throughput_tok_s"] > 0 and pd.isna(budget["throughput_low_tok_s"])
    (run,) = pd.read_csv(tables / "runs.csv").to_dict("records")
    assert (run["start_status"], run["cells_ok"]) == ("ok", 3) and pd.isna(run["ready_s"])


def test_somebodys_cache_is_left_alone_unless_asked_for(clone: Clone) -> None:
    del clone.config["targets"]["theirs"]["flush_cache"]
    clone.measure()
    (view,) = clone.views().values()
    assert view["cache_not_flushed"] == "targets.theirs.flush_cache is not set"
    clone.config["targets"]["theirs"]["flush_cache"] = True
    assert "prefix cache emptied: was False, is True" in clone.measure(status=1)
    clone.snakemake("probe")
    clone.measure()
    assert [record["cache_not_flushed"] for record in clone.records()].count(None) == 1


def test_an_endpoint_that_goes_away_in_a_cell_is_no_failed_server(clone: Clone, tmp_path: Path) -> None:
    short_lived = launch(tmp_path / "short_lived.log", *LAUNCHED, *TREE)
    clone.config["targets"]["theirs"]["url"] = short_lived.url
    clone.config["workloads"]["second"] |= {"max_tokens": 400, "ignore_eos": True, "blocks": [1, 2, 3, 4]}
    clone.block.update(workload=["first", "second"])
    process = clone.start("--", "measure")
    try:
        eventually(lambda: len(clone.records()) == 1, 90, "the first cell in the store")
        answered = rounds(short_lived)
        eventually(lambda: rounds(short_lived) >= answered + 2, 60, "answers of the second cell")
        end(short_lived)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
        end(short_lived)
    assert process.returncode == 1
    assert f"targets.theirs.url: {short_lived.url}: the server accepts no connections any more" in output
    first, second = sorted(clone.records(), key=lambda record: record["labels"]["workload"])
    assert (first["status"], first["aborted"]) == ("ok", None)
    assert second["status"] == "ok" and "accepts no connections any more" in second["aborted"]
    assert second["request_statuses"]["ok"] >= 2
    assert "does not answer" in clone.measure("--config", "retry_failed=true", status=1)
    assert len(clone.records()) == 2


def test_another_launch_configuration_is_refused_and_nothing_to_stop(clone: Clone, endpoint: Server) -> None:
    clone.block.update(budget=[8])
    output = clone.measure(status=1)
    assert "speculative_ddtree_budget: planned 8, the endpoint says 4" in output
    assert clone.records() == []
    assert "0 servers stopped" in clone.snakemake("stop_all")
    clone.block.update(budget=[4, 8])
    assert "2 servers are planned there" in clone.snakemake("plan", status=1)
    clone.block.update(budget=[4])
    clone.config["targets"]["theirs"]["served_model"] = "another"
    assert "served model: was served-toy, is another" in clone.measure(status=1)
    clone.snakemake("probe")
    assert "serves served-toy; name one of these" in clone.measure(status=1)
    assert endpoint.process.poll() is None


def test_an_interrupted_run_leaves_the_endpoint_alone(clone: Clone, endpoint: Server) -> None:
    clone.config["workloads"]["second"] |= {"max_tokens": 1500, "ignore_eos": True}
    clone.block.update(workload=["first", "second"])
    process = clone.start()
    try:
        eventually(lambda: len(clone.records()) == 1, 90, "the first cell in the store")
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        eventually(lambda: not clone.processes(), 30, "no process of the clone left")
    finally:
        process.kill()
        process.communicate()
    assert len(clone.records()) == 1
    assert endpoint.get("/health").status_code == 200
    clone.config["workloads"]["second"] |= {"max_tokens": 16}
    clone.measure()
    assert [record["status"] for record in clone.records()] == ["ok", "ok"]


def test_a_cell_that_reaches_its_deadline_is_kept_marked_and_measured_again_when_asked(clone: Clone) -> None:
    first = clone.config["workloads"]["first"]
    first |= {"cell_timeout_s": 3, "max_tokens": 8, "blocks": [1, 2, 3, 4], "open_loop_s": 4}
    clone.block.update(rate=2, arrivals="constant")
    output = clone.measure()
    (view,) = clone.views().values()
    assert (view["status"], view["aborted"]) == ("ok", "the cell's deadline of 3 s was reached")
    assert "warning: cell broken off" in output
    table = clone.root / "results" / "tables" / "cells.csv"
    assert pd.read_csv(table)["status"].tolist() == ["aborted"]
    first["cell_timeout_s"] = 300
    clone.measure("--config", "retry_failed=true")
    assert [record["aborted"] for record in clone.records()] == ["the cell's deadline of 3 s was reached", None]
    assert pd.read_csv(table)["status"].tolist() == ["ok"]
