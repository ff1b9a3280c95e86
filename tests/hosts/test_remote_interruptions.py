"""Whatever ends in the middle of a run over SSH, nothing is left on the host for long, and the next start goes on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clone import Clone, eventually
from lab import ENVIRONMENTS
from nspawn import Host
from remote import TTL_S, kill_all, measure, power_cut, recorded, server_processes, start_measuring, units

from ddtree_bench.records.store import Store
from ddtree_bench.spool import entry_of
from ddtree_bench.targets import host_tools

pytestmark = pytest.mark.slow

PACKAGE = "/opt/ddtree_bench.zip"
PYTHON = "/usr/bin/python3"
THEIRS = "theirs.service"

HOLD = """
import time
from pathlib import Path
from ddtree_bench.targets import lease
with lease.acquire("machine", Path({directory!r}), run="local-run"):
    time.sleep(600)
"""
"""A local run on the host."""


@pytest.fixture
def make_clone(measured_hosts: Clone, tmp_path: Path) -> Iterator[Callable[..., Clone]]:
    """`recorded` for the one clone of a test, of which nothing is left at its end."""

    def make(target: str, **more: object) -> Clone:
        return recorded(measured_hosts, tmp_path / "clone", target, **more)

    yield make
    kill_all(Clone(tmp_path / "clone", tmp_path, tmp_path))


def in_the_second_cell(clone: Clone) -> None:
    """Wait until the first cell is stored and the second is being measured."""
    eventually(lambda: len(clone.records()) == 1, 60, "the first cell in the store")
    time.sleep(1.0)


def nothing_is_left(host: Host, seconds: float) -> None:
    """See that servers, clients and keepers of a host are gone within some seconds."""
    eventually(lambda: not units(host), seconds, f"no unit left on {host.name}")
    assert server_processes(host) == []


def workloads(clone: Clone) -> list[str]:
    """The workloads whose cells are in the store, all of them ok, once for each attempt."""
    assert all((record["status"], record["aborted"]) == ("ok", None) for record in clone.records())
    return sorted(record["labels"]["workload"] for record in clone.records())


def finish(clone: Clone) -> None:
    """Go on with a short second cell in place of the long one, and see that the first is not measured again."""
    (first,) = clone.records()
    clone.config["workloads"]["second"]["max_tokens"] = 16
    clone.snakemake("--cores", "2", "--", "measure")
    assert workloads(clone) == ["first", "second"]
    assert first in clone.records()


def test_a_power_cut_of_the_measuring_machine_ends_what_it_ran_on_the_host(
    make_clone: Callable[..., Clone], deployed_hosts: tuple[Host, Host]
) -> None:
    host, clone = deployed_hosts[0], make_clone("gpu1")
    process = clone.start("--cores", "2", "--", "measure")
    in_the_second_cell(clone)
    assert len(units(host)) == 2 and server_processes(host)
    with power_cut(clone, host):
        process.communicate()
        nothing_is_left(host, TTL_S + 5)
    finish(clone)
    nothing_is_left(host, 1)


def test_a_killed_snakemake_leaves_nothing_on_the_host(
    make_clone: Callable[..., Clone], deployed_hosts: tuple[Host, Host]
) -> None:
    host, clone = deployed_hosts[1], make_clone("gpu2", lease_ttl_s=60)
    process = clone.start("--cores", "2", "--", "measure")
    in_the_second_cell(clone)
    process.kill()
    process.communicate()
    # It is not the lease that ends them.
    nothing_is_left(host, 20)
    eventually(lambda: not clone.processes(), 10, "no process left here")
    assert workloads(clone) == ["first"]


def test_what_a_client_on_the_host_measured_during_a_power_cut_is_fetched_once(
    make_clone: Callable[..., Clone], deployed_hosts: tuple[Host, Host]
) -> None:
    host, clone = deployed_hosts[1], make_clone("gpu2_inside", lease_ttl_s=TTL_S + 2)
    clone.config["workloads"]["second"]["max_tokens"] = 300
    process = start_measuring(clone)
    eventually(lambda: len(clone.records()) == 1, 60, "the first cell in the store")
    eventually(lambda: units(host, "ddtree-bench-client-*"), 20, "the client of the second cell")
    with power_cut(clone, host):
        cut_at = time.time()
        process.communicate()
        nothing_is_left(host, TTL_S + 2 + 5)
    starts = clone.starts()
    assert "was measured on the target at" in measure(clone)
    assert workloads(clone) == ["first", "second"]
    first, second = sorted(clone.records(), key=lambda record: record["started_at"])
    assert second["start_id"] == first["start_id"] and clone.starts() == starts
    assert utc(cut_at) < second["ended_at"] < utc(cut_at + TTL_S + 2 + 5)
    entry = entry_of(second["plan_key"], second["host_key"])
    assert entry not in host.exec("ls", f"{ENVIRONMENTS}/spool")
    assert "all 2 cells are in the store" in measure(clone)
    assert len(clone.records()) == 2 and clone.starts() == starts


def utc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))


def test_a_power_cut_of_the_host_is_no_result_and_the_run_is_tried_again(
    make_clone: Callable[..., Clone], deployed_hosts: tuple[Host, Host]
) -> None:
    host, clone = deployed_hosts[0], make_clone("gpu1", reconnect_s=40)
    clone.config["workloads"]["second"]["max_tokens"] = 800
    process = clone.start("--cores", "2", "--", "measure")
    in_the_second_cell(clone)
    host.crash()
    time.sleep(2)
    host.boot()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert "the host was started again" in output
    assert workloads(clone) == ["first", "second"] and len(clone.starts()) == 2
    assert list(Store(clone.store).problems()) == []
    nothing_is_left(host, 1)


def test_stop_all_ends_what_a_killed_pass_has_left(
    make_clone: Callable[..., Clone], deployed_hosts: tuple[Host, Host]
) -> None:
    host, clone = deployed_hosts[1], make_clone("gpu2", lease_ttl_s=300)
    process = start_measuring(clone)
    eventually(lambda: units(host, "ddtree-bench-server-*"), 60, "the server")
    kill_all(clone)
    process.communicate()
    assert server_processes(host)
    output = clone.snakemake("stop_all")
    assert "gpu2: ddtree-bench: server toy-ddtree-" in output and "1 servers stopped" in output
    nothing_is_left(host, 1)


def their_keeper(directory: Path) -> list[str]:
    """The command line of a lease that somebody else holds on a host for a run from elsewhere."""
    owner = {"user": "ann", "host": "laptop", "pid": 7, "run": "r1", "since": "yesterday", "workflow": "/home/ann/w"}
    options = ["--lease", f"{directory}/machine.lease", "--token", "f" * 32, "--ttl", "600", "--unit", THEIRS]
    module = "ddtree_bench.targets.lease_keeper"
    argv, _ = host_tools.command(PYTHON, PACKAGE, module, *options, "--scope", "system", "--owner", json.dumps(owner))
    return ["--property=Type=notify", *argv]


def their_local_run(directory: Path) -> list[str]:
    """The command line of a lease that a run on the host itself holds."""
    return [PYTHON, "-c", HOLD.format(directory=str(directory))]


@pytest.mark.parametrize(
    ("theirs", "who"),
    [
        (their_keeper, ("ann (host laptop, process 7, run r1, workflow /home/ann/w) since yesterday",)),
        (their_local_run, ("root (host gpu2, process", "run local-run, workflow /) since 20")),
    ],
)
def test_a_host_that_somebody_else_holds_is_waited_for_and_left_alone(
    make_clone: Callable[..., Clone],
    deployed_hosts: tuple[Host, Host],
    tmp_path: Path,
    theirs: Callable[[Path], list[str]],
    who: tuple[str, ...],
) -> None:
    host, clone = deployed_hosts[1], make_clone("gpu2", lease_wait_s=0)
    clone.block["workload"] = "first"
    shutil.copy(host_tools.archive(tmp_path), host.root / PACKAGE.lstrip("/"))
    unit = ("--collect", f"--unit={THEIRS}", f"--setenv=PYTHONPATH={PACKAGE}")
    host.exec("systemd-run", *unit, *theirs(clone.lease_dir))
    try:
        eventually(lambda: host.exec("cat", f"{clone.lease_dir}/machine.lease", check=False), 10, "their lease")
        before = host.exec("systemctl", "show", "--property=InvocationID,MainPID", THEIRS)
        output = measure(clone, status=1)
        assert all(words in output for words in who) and "targets.gpu2.lease_wait_s" in output
        assert "0 servers stopped" in clone.snakemake("stop_all")
        clone.config["targets"]["gpu2"]["lease_wait_s"] = 60
        process = start_measuring(clone)
        assert process.stdout is not None
        said = next(line for line in process.stdout if "gpu2: waiting, for the lease" in line)
        assert all(words in said for words in who)
        assert host.exec("systemctl", "show", "--property=InvocationID,MainPID", THEIRS) == before
        assert server_processes(host) == []
    finally:
        host.exec("systemctl", "stop", THEIRS)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert workloads(clone) == ["first"]
