"""Runs through a link that is cut: what was measured meanwhile is measured again, and is nobody's failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import toy_engine
from configurations import tree, write_project
from cut_link import LinkedLauncher

from ddtree_bench import plan
from ddtree_bench.client_on_target import ClientPlace
from ddtree_bench.config import validate
from ddtree_bench.link_watch import TRIES
from ddtree_bench.plan import Run
from ddtree_bench.project import Folders, Project
from ddtree_bench.records.store import REQUESTS, SERVER_LOG, TELEMETRY, Attempt, Store
from ddtree_bench.run_start import Confirmed, RunStart
from ddtree_bench.spool import Spool
from ddtree_bench.targets.launcher import ServerState, TargetError
from ddtree_bench.targets.lease import Owner
from ddtree_bench.targets.lifeline import Interruption
from ddtree_bench.targets.probe import recorded_name

CUT_S = 1.5
MEASURED, WARMING = b"measured", b"warming"


def passes(*cut_at: int, word: bytes = MEASURED) -> Callable[[bytes], float]:
    """Cuts the link when the n-th request that has a word goes over it."""
    seen = itertools.count(1)
    return lambda data: CUT_S if b"POST /v1/chat" in data and word in data and next(seen) in cut_at else 0.0


def project(root: Path) -> Project:
    config = tree()
    config |= {"repeats": 1, "max_restarts": 0}
    config["sweep"][0] |= {"method": "AR", "budget": None}
    validated, points = validate(config, write_project(root))
    environments = {("local", "reference"): "e" * 64}
    return Project(
        validated,
        plan.build(validated, points, root, environments),
        Folders.below(root / "results"),
        root,
        environments,
    )


def from_the_target(run: Run) -> Run:
    """A run as it is when its load clients are on the target."""
    server = replace(run.server, client="target")
    return replace(run, server=server, cells=tuple(replace(cell, server=server) for cell in run.cells))


class LinkedRun:
    """A run of one cell on a toy server behind a link; `reconnect_s` is that of its target.

    `client` is the interpreter of a load client beside the server; without one the load goes through the link.
    """

    def __init__(
        self,
        root: Path,
        *options: str,
        reconnect_s: float = 300.0,
        launcher: LinkedLauncher | None = None,
        client: str | None = None,
        **link: Any,
    ) -> None:
        self.root = root
        self.said: list[str] = []
        self._options = options
        self._client = client
        self.launcher = launcher or LinkedLauncher(root, **link)
        self.project = project(root)
        targets = self.project.config.targets
        patient = {"local": targets["local"].model_copy(update={"reconnect_s": reconnect_s})}
        self.project = replace(self.project, config=self.project.config.model_copy(update={"targets": patient}))
        self.store = Store(self.project.folders.store)

    def measure(self) -> Attempt:
        """Measure; returns the attempt that the store holds then."""
        (run,) = self.project.plan.runs
        client = None
        if self._client is not None:
            run = from_the_target(run)
            spool = Spool(self.launcher, self.project.deploy_root("local"), Owner.this_process("test"))
            client = ClientPlace(self._client, spool)
        machine = {"cpu": {"model": "c", "cores": 1}, "gpus": [], "driver": None, "platform": "p"}
        host = {**machine, "models": {recorded_name("toy", "1"): {"fingerprint": "d" * 64}}}
        confirmed = Confirmed(host, {"python": toy_engine.python(self.root, *self._options)}, client)
        start = RunStart(self.project, run, self.store, self.launcher, confirmed, self.said.append)
        with self.launcher.acquire("test", 0, print), Interruption() as interruption:
            assert start.measure(run.cells, interruption, starts_left=1) == []
        (attempt,) = self.store.readable()
        return attempt


def test_the_link_s_round_trips_are_in_the_record(tmp_path: Path) -> None:
    attempt = LinkedRun(tmp_path).measure()
    assert attempt.record["status"] == "ok" and attempt.record["client_place"] == "here"
    assert attempt.record["link"] == {"round_trip_s": {"median": 0.002, "p90": 0.003, "max": 0.003, "n": 3}}


def test_what_the_machine_did_is_in_the_record_and_beside_it(tmp_path: Path) -> None:
    attempt = LinkedRun(tmp_path).measure()
    assert attempt.record["telemetry"]["errors"] == [] and attempt.record["telemetry"]["clock_offset_s"] == 0
    samples, requests = pd.read_parquet(attempt.folder / TELEMETRY), pd.read_parquet(attempt.folder / REQUESTS)
    assert samples["time"].min() <= requests["t_send"].min() <= requests["t_end"].max() <= samples["time"].max()


@pytest.mark.parametrize("at", [1, 3])
def test_a_cell_whose_link_was_cut_is_measured_again(tmp_path: Path, at: int) -> None:
    run = LinkedRun(tmp_path, passes=passes(at))
    attempt = run.measure()
    assert attempt.record["status"] == "ok" and attempt.record["request_statuses"] == {"ok": 4}
    assert attempt.record["aborted"] is None and attempt.record["attempt"] == 1
    assert attempt.record["server_log"]["values"]["decode_lines"] == 4, "the lines of the cell that was kept"
    (told,) = [line for line in run.said if "the link was cut" in line]
    assert told.endswith("so nothing of it is kept (try 1 of 3)")


def test_a_warm_up_whose_link_was_cut_is_done_again(tmp_path: Path) -> None:
    attempt = LinkedRun(tmp_path, passes=passes(1, word=WARMING)).measure()
    assert attempt.record["status"] == "ok" and attempt.record["warmup"]["shapes"][0]["errors"] == []


@pytest.mark.parametrize("word", [MEASURED, WARMING])
def test_a_server_out_of_reach_while_the_link_holds_is_no_result(tmp_path: Path, word: bytes) -> None:
    run = LinkedRun(tmp_path, untold=passes(2, word=word))
    attempt = run.measure()
    assert attempt.record["status"] == "ok" and attempt.record["attempt"] == 1
    assert attempt.record["request_statuses"] == {"ok": 4} and attempt.record["aborted"] is None
    (told,) = [line for line in run.said if "the link to the target is lost" in line]
    assert told.endswith("so nothing of it is kept (try 1 of 3)")


def test_a_server_out_of_reach_is_not_waited_for_without_end(tmp_path: Path) -> None:
    seen = itertools.count(1)
    run = LinkedRun(tmp_path, reconnect_s=0.5, untold=lambda data: 60.0 * (MEASURED in data and next(seen) == 1))
    with pytest.raises(TargetError, match=r"targets\.local: for 0.5 s nothing was told of the server toy-ar; see to"):
        run.measure()
    assert list(run.store.readable()) == []


def test_a_link_that_is_cut_while_the_server_loads_is_waited_for(tmp_path: Path) -> None:
    seen = itertools.count(1)
    run = LinkedRun(tmp_path, "--load-s", "1", passes=lambda _: CUT_S if next(seen) == 3 else 0.0)
    attempt = run.measure()
    assert attempt.record["status"] == "ok" and attempt.record["ready_s"] > CUT_S


def test_a_first_completion_whose_link_was_cut_is_asked_for_again(tmp_path: Path) -> None:
    seen = itertools.count(1)

    def cut(data: bytes) -> float:
        return CUT_S if b"POST /v1/completions" in data and next(seen) == 1 else 0.0

    assert LinkedRun(tmp_path, passes=cut).measure().record["status"] == "ok"
    assert next(seen) == 3


def test_a_link_that_never_holds_is_the_target_s_fault(tmp_path: Path) -> None:
    run = LinkedRun(tmp_path, passes=passes(2, 4, 6))
    with pytest.raises(TargetError, match=f"the link to the target did not hold in any of {TRIES} tries"):
        run.measure()
    assert list(run.store.readable()) == []


@pytest.mark.parametrize(
    "ended",
    [ServerState(False, exit_code=3, reason="exited"), ServerState(False, reason="lease", why="lost its lease")],
)
def test_a_server_that_ended_behind_a_cut_link_is_no_result(tmp_path: Path, ended: ServerState) -> None:
    run = LinkedRun(tmp_path, passes=passes(2), ended=ended)
    with pytest.raises(TargetError, match=f"the server {ended} while the link to it was cut"):
        run.measure()
    assert list(run.store.readable()) == []


def test_a_server_that_ends_while_the_link_holds_is_a_result(tmp_path: Path) -> None:
    attempt = LinkedRun(tmp_path, "--crash-at", "2").measure()
    assert attempt.record["status"] == "failed" and "exit status 3 during short at c1" in attempt.record["reason"]
    assert attempt.record["log_tail"].splitlines()[-1] == "CUDA out of memory"
    assert attempt.record["request_statuses"]["ok"] == 1
    assert attempt.record["link"]["round_trip_s"]["n"] == 3 and attempt.record["telemetry"]["errors"] == []


@pytest.mark.parametrize("options", [(), ("--crash-at", "2")])
def test_the_log_is_the_one_that_was_fetched(tmp_path: Path, options: tuple[str, ...]) -> None:
    log = tmp_path / "fetched.log"
    log.write_bytes(b"fetched\n")
    attempt = LinkedRun(tmp_path, *options, log=log).measure()
    assert (attempt.folder / SERVER_LOG).read_bytes() == b"fetched\n"
