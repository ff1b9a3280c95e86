"""The load client on the target: a process of its own that measures a cell, and the cell's record made from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from client_launcher import ClientLauncher, StartedLauncher
from load_cases import ONE, SHORT, WORK, closed_port, prompts
from pages_server import sample
from scripted_server import Script, ScriptedServer, words
from test_external_runs import FAILED, HALF, Endpoint, project
from test_link_runs import LinkedRun, from_the_target

from ddtree_bench.client_on_target import ClientPlace
from ddtree_bench.deployment import external_receipt
from ddtree_bench.hosts import record_host
from ddtree_bench.load.cell_work import CellWork
from ddtree_bench.load.observed import measure_observed
from ddtree_bench.load.on_target import ClientRequest, read_request, write_request
from ddtree_bench.load.outcome import DONE, OUTCOME, OutcomeDamaged, read_outcome, write_outcome
from ddtree_bench.load.telemetry import Telemetry
from ddtree_bench.project import Project
from ddtree_bench.records.files import sha256_file, write_json
from ddtree_bench.records.store import REQUESTS, SERVER_LOG, SERVER_SAMPLES, TELEMETRY, Attempt, Store
from ddtree_bench.run_start import Confirmed, RunStart
from ddtree_bench.spool import Spool
from ddtree_bench.targets import host_tools
from ddtree_bench.targets.commands import LocalStream
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.lease import Owner
from ddtree_bench.targets.lifeline import Interrupted, Interruption

LINES = sample("0.5.22", "decode_log.txt")


def request(base_url: str, **fields: Any) -> ClientRequest:
    work = CellWork(base_url, "m", WORK, ONE, prompts(3), SHORT, seed=5)
    return ClientRequest(
        **{"id": "one", "work": work, "server_pid": None, "log_argv": (), "draft": {"a": [1]}, "owner": {}, **fields}
    )


def run_client(folder: Path, asked: ClientRequest) -> subprocess.CompletedProcess[str]:
    """Run the client from an archive of the package, as it runs on a target, and wait for its end."""
    folder.mkdir()
    write_request(asked, folder)
    tools = host_tools.archive(folder.parent / "tools")
    argv, env = host_tools.command(sys.executable, str(tools), "ddtree_bench.load.on_target", str(folder))
    return subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False)


def test_a_request_comes_over_as_it_is(tmp_path: Path) -> None:
    work = CellWork("http://h:1", "m", replace(WORK, blocks=(1, 2)), ONE, prompts(2), SHORT, seed=3)
    asked = request("", work=work, server_pid=7, log_argv=["cat", "a b"])
    write_request(asked, tmp_path)
    assert read_request(tmp_path) == asked


def test_a_client_measures_from_the_archive_and_writes_an_outcome(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(LINES)

    def answer(_: dict[str, Any]) -> Script:
        if len(server.requests) == 1:
            log.write_bytes(LINES + LINES)
        return words(4)

    with ScriptedServer(answer, info={"version": "0.5.22"}) as server:
        ran = run_client(tmp_path / "cell", request(server.base_url, log_argv=["cat", str(log)]))
    assert (ran.returncode, ran.stderr) == (0, "")
    outcome = read_outcome(tmp_path / "cell")
    requests = outcome.measurement.requests
    assert requests["status"].tolist() == ["ok"] * 3 and requests["completion_tokens"].sum() == 12
    assert requests["prompt_id"].tolist() == ["p0", "p1", "p2"]
    assert outcome.measurement.client["connections_preopened"] == 1
    assert outcome.before.values == outcome.after.values == {"running_requests": 0, "queued_requests": 0}
    assert outcome.server_log["values"]["decode_lines"] == 2 and outcome.log == LINES + LINES
    assert outcome.telemetry is not None and outcome.telemetry["errors"] == [] and outcome.telemetry["window_s"] > 0
    assert outcome.telemetry_samples is not None and set(outcome.telemetry_samples["device"]) >= {"cpu"}
    assert outcome.started_at < outcome.ended_at and outcome.server_ended is None


def test_a_cell_ends_with_the_server_s_process(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with ScriptedServer(lambda _: HALF) as server:
        run_client(tmp_path / "cell", request(server.base_url, server_pid=gone.pid))
    outcome = read_outcome(tmp_path / "cell")
    assert outcome.server_ended == outcome.measurement.aborted == f"has ended (process {gone.pid} is gone)"
    assert "ok" not in set(outcome.measurement.requests["status"])


def test_a_client_that_cannot_measure_says_why(tmp_path: Path) -> None:
    ran = run_client(
        tmp_path / "cell", request("http://127.0.0.1:9", log_argv=["sh", "-c", "echo no rights >&2; exit 3"])
    )
    assert ran.returncode == 1
    with pytest.raises(OutcomeDamaged, match="sh gave no log of the server: no rights"):
        read_outcome(tmp_path / "cell")


def test_a_log_that_cannot_be_fetched_at_the_end_costs_the_cell_nothing_else(tmp_path: Path) -> None:
    once = f"[ ! -e {tmp_path}/asked ] || {{ echo journald is gone >&2; exit 3; }}; touch {tmp_path}/asked; echo line"
    with ScriptedServer(lambda _: words(1)) as server:
        ran = run_client(tmp_path / "cell", request(server.base_url, log_argv=["sh", "-c", once]))
    assert (ran.returncode, ran.stderr) == (0, "")
    outcome = read_outcome(tmp_path / "cell")
    assert outcome.measurement.requests["status"].tolist() == ["ok"] * 3 and outcome.log == b""
    (why,) = set(outcome.server_log["missing"].values())
    assert why.endswith("when the cell had ended: sh gave no log of the server: journald is gone")


def test_lines_that_come_late_into_the_log_are_of_their_cell(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"")

    def answer(_: dict[str, Any]) -> Script:
        if len(server.requests) == 3:
            threading.Timer(0.3, log.write_bytes, [LINES]).start()
        return words(1)

    with ScriptedServer(answer) as server:
        run_client(tmp_path / "cell", request(server.base_url, log_argv=["cat", str(log)]))
    assert read_outcome(tmp_path / "cell").server_log["values"]["decode_lines"] == 2


def test_of_a_sampler_that_fails_there_is_no_table(tmp_path: Path) -> None:
    with ScriptedServer(lambda _: words(1)) as server:
        broken = Telemetry(LocalStream, ["false"])
        work = request(server.base_url).work
        outcome = measure_observed(work, fetch_log=lambda: None, ended=lambda: None, telemetry=broken)
    write_outcome(outcome, tmp_path)
    assert not (tmp_path / TELEMETRY).exists()
    told = read_outcome(tmp_path)
    assert told.telemetry is not None and "ended early" in told.telemetry["errors"][0]
    assert told.telemetry_samples is None


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Give a file of an outcome another content, and its digest with it."""
    (folder / name).write_bytes(content)
    done = json.loads((folder / DONE).read_text())
    done["files"][name] = sha256_file(folder / name)
    write_json(folder / DONE, done)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (OUTCOME, b"[]"),
        (OUTCOME, b'{"client": {}}'),
        (REQUESTS, b"no table"),
        (SERVER_SAMPLES, b""),
        (TELEMETRY, b"no table"),
    ],
)
def test_an_outcome_of_another_kind_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    with ScriptedServer(lambda _: words(1)) as server:
        run_client(tmp_path / "cell", request(server.base_url))
    rewrite(tmp_path / "cell", name, content)
    with pytest.raises(OutcomeDamaged, match="cannot be read"):
        read_outcome(tmp_path / "cell")


@pytest.mark.parametrize("name", [REQUESTS, SERVER_LOG, OUTCOME, DONE])
@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_outcome_is_refused(tmp_path: Path, name: str, lost: bool) -> None:
    with ScriptedServer(lambda _: words(1)) as server:
        run_client(tmp_path / "cell", request(server.base_url))
    path = tmp_path / "cell" / name
    if lost:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3] + b"\x00\x00\x00")
    with pytest.raises(OutcomeDamaged, match=name):
        read_outcome(tmp_path / "cell")


class OnTarget:
    """A run whose clients are on the target, and what it is measured with."""

    def __init__(self, root: Path, endpoint: Endpoint, **launcher: Any) -> None:
        opened = project(root, endpoint.server.base_url)
        self.project: Project = opened
        self.host = record_host(opened, "there", lambda _: None)
        self.run = from_the_target(opened.plan.runs[0])
        self.store = Store(opened.folders.store)
        self.launcher = ClientLauncher(root, endpoint.server.base_url, **launcher)
        self.said: list[str] = []

    def measure(self, python: str = sys.executable) -> list[Attempt]:
        """Measure the run's cells and return what the store holds."""
        client = None if self.run.server.client is None else ClientPlace(python, self.spool)
        confirmed = Confirmed(self.host, external_receipt("sglang"), client)
        start = RunStart(self.project, self.run, self.store, self.launcher, confirmed, self.said.append)
        with Interruption() as interruption:
            assert start.measure(self.run.cells, interruption, starts_left=1) == []
        return list(self.store.readable())

    @property
    def spool(self) -> Spool:
        return Spool(self.launcher, self.project.deploy_root("there"), Owner.this_process("test"))

    def entries(self) -> list[Path]:
        """The folders of what lies in the spool."""
        return [Path(self.spool.path(entry)) for entry in self.spool.entries()]


@contextmanager
def on_target(root: Path, endpoint: Endpoint, **launcher: Any) -> Iterator[OnTarget]:
    made = OnTarget(root, endpoint, **launcher)
    try:
        yield made
    finally:
        made.launcher.close()


def test_the_record_is_that_of_a_client_here_but_for_its_place(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(LINES)
    with Endpoint() as endpoint:
        with on_target(tmp_path / "there", endpoint, log=log) as there:
            (far,) = there.measure()
        here = OnTarget(tmp_path / "here", endpoint, log=log)
        here.run = here.project.plan.runs[0]
        (near,) = here.measure()
    # Nothing is known of the machine of an endpoint; the client on the target knows that it is there.
    assert set(far.record) == set(near.record) | {"spooled", "telemetry"}
    assert set(far.record["files"]) == set(near.record["files"]) | {TELEMETRY}
    assert (near.record["client_place"], far.record["client_place"]) == ("here", "target")
    assert far.record["plan_key"] != near.record["plan_key"] and far.record["host_key"] == near.record["host_key"]
    assert far.record["request_statuses"] == near.record["request_statuses"] == {"ok": 4}
    assert set(far.record["client"]) == set(near.record["client"])
    assert (far.folder / SERVER_LOG).read_bytes() == (near.folder / SERVER_LOG).read_bytes() == LINES
    assert list(there.store.problems()) == [] and there.entries() == []


def started_on_target(root: Path, *options: str, **launcher: Any) -> Attempt:
    """Measure a cell of a toy server that is started, from the target; returns the attempt."""
    started = StartedLauncher(root, **launcher)
    try:
        return LinkedRun(root, *options, launcher=started, client=sys.executable).measure()
    finally:
        started.close()


def test_a_server_that_ends_before_its_launcher_knows_has_failed_the_cell(tmp_path: Path) -> None:
    record = started_on_target(tmp_path, "--crash-at", "2", noticed_s=2.0).record
    assert record["status"] == "failed" and "exit status 3 during short at c1" in record["reason"]
    assert record["request_statuses"]["ok"] == 1 and len(record["spooled"]) == 32


def test_a_server_that_ends_while_its_outcome_is_fetched_has_not_failed_the_cell(tmp_path: Path) -> None:
    record = started_on_target(tmp_path, dies_fetched=True).record
    assert (record["status"], record["aborted"], record["request_statuses"]) == ("ok", None, {"ok": 4})


def test_answers_that_all_fail_are_a_result_of_a_client_there_too(tmp_path: Path) -> None:
    with Endpoint(lambda _: FAILED) as endpoint, on_target(tmp_path, endpoint) as there:
        (attempt,) = there.measure()
    assert (attempt.record["status"], attempt.record["reason"]) == ("failed", "no request succeeded: 4 x http_error")
    assert attempt.record["request_statuses"] == {"http_error": 4} and there.entries() == []
    assert len(attempt.record["spooled"]) == 32 and attempt.record["telemetry"]["errors"] == []


def test_a_client_that_dies_is_no_result(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named pandas >&2\nexit 1\n")
    broken.chmod(0o755)
    said = (
        r"targets\.there: toy-ar: short at c1: the client on the target ended with exit status 1, before it had done: "
        rf"no module named pandas; see what is there in {tmp_path}.*/spool/.*, and run again"
    )
    with (
        Endpoint() as endpoint,
        on_target(tmp_path, endpoint) as there,
        pytest.raises(TargetError, match=said),
    ):
        there.measure(python=str(broken))
    assert list(there.store.readable()) == []


def test_a_client_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = 1.0
    with Endpoint(lambda _: HALF) as endpoint, on_target(tmp_path, endpoint) as there:
        cell_s = there.project.config.workloads["short"].cell_timeout_s
        monkeypatch.setattr("ddtree_bench.client_on_target.SPARE_S", limit_s - cell_s)
        with pytest.raises(TargetError, match="the client on the target did not come to its end in time"):
            there.measure()
        assert there.launcher.stopped == list(there.launcher.clients)
    assert list(there.store.readable()) == []


def test_an_interrupted_run_ends_its_client(tmp_path: Path) -> None:
    def answer(_: int) -> Script:
        os.kill(os.getpid(), signal.SIGTERM)
        return HALF

    with Endpoint(answer) as endpoint, on_target(tmp_path, endpoint) as there:
        with pytest.raises(Interrupted):
            there.measure()
        (client,) = there.launcher.clients
        assert there.launcher.stopped == [client] and there.launcher.clients[client].poll() is not None
    (entry,) = there.entries()
    assert client.startswith(entry.name) and not (entry / DONE).exists()


def test_nothing_that_a_client_there_imports_needs_more_than_its_environment() -> None:
    """The client's environment has the packages of its lock, and nothing of ours."""
    code = (
        "import sys; before = set(sys.modules); import ddtree_bench.load.on_target\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "import importlib.metadata as m; found = m.packages_distributions()\n"
        "import json; print(json.dumps(sorted({d.lower().replace('_', '-') for t in tops for d in found.get(t, [])})))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lock = (Path(__file__).parents[2] / "envs" / "client" / "client.lock").read_text()
    locked = {line.partition("==")[0].strip().lower() for line in lock.splitlines() if "==" in line}
    assert {"pandas", "pyarrow"} <= set(json.loads(told.stdout)) - {"ddtree-bench"} <= locked


def test_the_port_of_a_client_s_server_need_not_be_open(tmp_path: Path) -> None:
    run_client(tmp_path / "cell", request(f"http://127.0.0.1:{closed_port()}"))
    outcome = read_outcome(tmp_path / "cell")
    assert set(outcome.measurement.requests["status"]) == {"connect_error"}
