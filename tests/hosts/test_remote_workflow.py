"""The whole workflow over SSH, on hosts with systemd: the same tables as on this machine, and what records tell."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import chain, combinations, pairwise
from typing import Any

import pandas as pd
import pytest
from clone import REPOSITORY, Clone
from lab import ENVIRONMENTS, Lab
from nspawn import Host
from remote import journal, lease_spans, logins, one_host, server_processes, units
from ssh_client import answers_ssh

from ddtree_bench.deployment import confirm_deployment
from ddtree_bench.launchers import target_launcher
from ddtree_bench.project import open_project
from ddtree_bench.spool import entry_of

pytestmark = pytest.mark.slow

SAME = {
    "cells": [
        *("method", "workload", "load", "repeat", "status", "reason", "aborted", "attempt", "environment", "flags"),
        *("prompts_sha256", "texts_sha256", "answered_sha256", "engine_version", "numerics", "bit_exact", "warmup"),
        *("requests", "requests_ok", "finished_by_length", "prompt_tokens", "output_tokens", "token_source"),
        *("server_generation_tokens", "server_verify_calls", "counter_mismatch", "not_confirmed"),
        *("accept_length", "accept_length_rounds", "tree_max_depth", "model", "drafter", "verify_width"),
    ],
    "requests": [
        *("index", "prompt_id", "prompt_sha256", "status", "finish_reason", "prompt_tokens", "output_tokens"),
        *("text_sha256", "rounds", "accepted_drafts", "proposed_drafts", "tree_nodes", "tree_max_depth", "n1"),
    ],
    "runs": ["method", "repeat", "start_status", "cells_ok", "cells_failed", "engine_version", "kernel", "cpu_model"],
    "speedup": ["method", "comparison", "reason", "n", "accept_length_factor", "identical_share", "prompts_compared"],
    "acceptance": ["workload", "load", "repeat", "depth", "probability", "rounds"],
    "budget": ["method", "budget", "n", "n_failed", "requests_ok", "accept_length", "accept_length_macro"],
    "crossovers": ["outcome", "n_concurrencies", "n", "common_prompts", "accept_length_common_low", "reason"],
}
"""Columns that have no times: a server gives the same wherever it runs."""

MEASURED = [
    *("wall_s", "throughput_full_tok_s", "throughput_steady_tok_s", "user_speed_tok_s", "ttft_p50_s", "e2e_mean_s"),
    *("tpot_mean_s", "itl_mean_s", "icl_p90_s", "round_time_s", "client_event_lag_p99_s", "mean_in_flight"),
]
"""Columns of `cells` that have times, which are others everywhere, but are there."""


def table(clone: Clone, name: str, target: str, method: str | None = None) -> pd.DataFrame:
    """The rows of a table on one target, which name its servers by their method."""
    rows = pd.read_csv(clone.root / "results" / "tables" / f"{name}.csv")
    rows = rows[rows["target"] == target].reset_index(drop=True)
    if "method" not in rows:
        rows["method"] = ["AR" if "-ar-" in server else "DDTREE" for server in rows["server"]]
    return rows if method is None else rows[rows["method"] == method].reset_index(drop=True)


def views(clone: Clone, target: str) -> list[dict[str, Any]]:
    return [view for view in clone.views().values() if view["labels"]["target"] == target]


@pytest.fixture
def hosts(measured_hosts: Clone, lab: Lab) -> list[Host]:
    """The hosts `gpu1`, `gpu2` and `inner`, after the pass."""
    assert measured_hosts.views()
    machines = {machine.name: machine for machine in lab.machines}
    return [host for name in ("gpu1", "gpu2", "inner") if isinstance(host := machines[name], Host)]


@pytest.mark.parametrize("name", SAME)
def test_tables_are_those_of_servers_on_this_machine(measured_hosts: Clone, name: str) -> None:
    here, there = table(measured_hosts, name, "local"), table(measured_hosts, name, "gpu1")
    assert set(here["method"]) >= {"DDTREE"}
    pd.testing.assert_frame_equal(there[SAME[name]], here[SAME[name]])


@pytest.mark.parametrize("target", ["gpu2", "gpu2_inside", "inner"])
@pytest.mark.parametrize("name", ["cells", "requests", "acceptance"])
def test_cells_are_those_of_a_server_on_this_machine(measured_hosts: Clone, name: str, target: str) -> None:
    here, there = table(measured_hosts, name, "local", "DDTREE"), table(measured_hosts, name, target)
    pd.testing.assert_frame_equal(there[SAME[name]], here[SAME[name]])


@pytest.mark.parametrize("target", ["gpu1", "gpu2", "gpu2_inside", "inner"])
def test_what_is_timed_on_this_machine_is_timed_over_a_link(measured_hosts: Clone, target: str) -> None:
    cells, requests = (table(measured_hosts, name, target) for name in ("cells", "requests"))
    assert (cells[MEASURED] > 0).all(axis=None)
    assert (requests[["ttft_s", "e2e_s", "tpot_s", "user_speed_tok_s"]] > 0).all(axis=None)


def test_hosts_are_measured_at_once_and_each_by_one_run_at_a_time(measured_hosts: Clone, hosts: list[Host]) -> None:
    spans = [lease_spans(host, measured_hosts.root) for host in hosts]
    # Two targets are on gpu2: the lease keeps apart what Snakemake's resources do not.
    assert [len(of_host) for of_host in spans] == [2, 2, 1]
    for of_host in spans:
        assert all(before[1] <= after[0] for before, after in pairwise(of_host)), of_host
    pairs = ((a, b) for first, second in combinations(spans, 2) for a in first for b in second)
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in pairs), spans
    for targets in (["gpu1"], ["gpu2", "gpu2_inside"]):
        cells = sorted((v["started_at"], v["ended_at"]) for target in targets for v in views(measured_hosts, target))
        assert all(before[1] <= after[0] for before, after in pairwise(cells)), cells


def test_nothing_is_to_be_done_again_and_no_host_is_asked(measured_hosts: Clone, hosts: list[Host]) -> None:
    before = [logins(host) for host in hosts]
    assert "Nothing to be done" in measured_hosts.measure("--cores", "4")
    assert [logins(host) for host in hosts] == before
    assert min(before) > 0


@pytest.mark.parametrize("target", ["gpu1", "gpu2", "inner"])
def test_a_record_tells_of_host_environment_link_and_machine(measured_hosts: Clone, target: str) -> None:
    for view in views(measured_hosts, target):
        assert (view["status"], view["client_place"], view["host"]["hostname"]) == ("ok", "here", target)
        assert view["host"]["container"] == "systemd-nspawn" and view["host"]["gpus"] == []
        assert view["environment"]["folder"].startswith(f"{ENVIRONMENTS}/reference-")
        assert view["server_info"]["model_path"].startswith(view["environment"]["folder"])
        trips = view["link"]["round_trip_s"]
        assert trips["n"] >= 1 and 0 < trips["median"] <= trips["p90"] <= trips["max"] < 2
        told = view["telemetry"]
        assert told["samples"] >= 1 and told["cpu"]["utilization_percent_mean"] > 0
        assert "nvidia-smi" in told["missing"]["gpus"]
        # One machine beneath both: their clocks differ by what the estimate is wrong.
        assert abs(told["clock_offset_s"]) < 0.2


def test_the_log_of_a_server_is_its_own_and_whole(measured_hosts: Clone, hosts: list[Host]) -> None:
    printed: dict[str, list[str]] = {}
    for entry in chain.from_iterable(journal(host, "_TRANSPORT=stdout") for host in hosts):
        printed.setdefault(entry.get("_SYSTEMD_UNIT", ""), []).append(entry["MESSAGE"])
    there = [view for target in ("gpu1", "gpu2", "gpu2_inside", "inner") for view in views(measured_hosts, target)]
    assert len({view["start_id"] for view in there}) == 5
    for view in there:
        (log,) = (measured_hosts.root / "results" / "logs" / "servers").glob(f"*/*-{view['start_id']}.log")
        (unit,) = [name for name in printed if name.startswith("ddtree-bench-server-") and view["start_id"] in name]
        assert log.read_text().splitlines() == printed[unit] != []
        (stored,) = measured_hosts.store.glob(f"{view['plan_key'][:12]}/*/attempts/1/server.log")
        assert stored.read_text() and log.read_text().startswith(stored.read_text())


def test_a_host_behind_another_is_reached_through_it(measured_hosts: Clone, hosts: list[Host]) -> None:
    inner = hosts[2]
    assert not answers_ssh(inner.address, 22)
    assert logins(inner) > 0 and len(views(measured_hosts, inner.name)) == 1


def test_a_client_on_the_host_measures_without_the_link_and_leaves_nothing_there(
    measured_hosts: Clone, hosts: list[Host]
) -> None:
    (view,), (here,) = views(measured_hosts, "gpu2_inside"), views(measured_hosts, "gpu2")
    assert (view["status"], view["client_place"], len(view["spooled"])) == ("ok", "target", 32)
    assert view["telemetry"]["samples"] >= 1
    assert view.keys() ^ here.keys() == {"link", "spooled"}
    assert view["files"].keys() == here["files"].keys()
    entry = entry_of(view["plan_key"], view["host_key"])
    assert entry not in hosts[1].exec("ls", f"{ENVIRONMENTS}/spool")


def test_nothing_is_left_on_a_host_when_the_workflow_has_ended(hosts: list[Host]) -> None:
    for host in hosts:
        assert units(host) == server_processes(host) == []
        assert "ddtree-bench" not in host.exec("ls", "/run/systemd/system")


def test_to_deploy_again_takes_no_time_and_sends_nothing(hosts: list[Host], lab: Lab) -> None:
    project = open_project(one_host(lab, "gpu2"), REPOSITORY, REPOSITORY / "results")
    said: list[str] = []
    received, began = received_bytes(hosts[1]), time.monotonic()
    with closing(target_launcher(project, "gpu2", said.append)) as launcher:
        receipt = confirm_deployment(project, launcher, "gpu2", "reference", said.append)
    assert time.monotonic() - began < 5
    assert said[-1] == f"{receipt['folder']}: already deployed"
    # Its wheels are hundreds of megabytes; this is the conversation.
    assert received_bytes(hosts[1]) - received < 2**20


def received_bytes(host: Host) -> int:
    """What has come in over a host's link since its boot."""
    lines = host.exec("cat", "/proc/net/dev").splitlines()[2:]
    return sum(int(line.split()[1]) for line in lines if not line.strip().startswith("lo:"))
