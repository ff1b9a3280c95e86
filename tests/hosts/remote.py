"""Clones whose targets are hosts of the lab, what became of their runs there, and measuring processes to be killed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from clone import CONFIG, Clone
from lab import ENVIRONMENTS, Lab
from nspawn import Host

TTL_S = 10

KEEPERS = "ddtree-bench-lease-"
"""What the names of units that hold leases begin with."""

UNIT_STARTED = "39f53479d3a045ac8e11786248231fbf"
UNIT_STOPPED = "9d1aaa27d60140bd96365438aad20286"
"""Message ids of systemd(1): a unit has started, and has stopped."""

MEASURE = """\
from pathlib import Path
import yaml
from ddtree_bench.project import open_project
from ddtree_bench.rule_log import logged_to
from ddtree_bench.run import measure_run
with logged_to("results/logs/measured.log") as report:
    project = open_project(yaml.safe_load(Path("config/config.yaml").read_text()), Path.cwd())
    for run in project.plan.runs:
        measure_run(project, run, report)
"""
"""What the scripts of the runs do, one run after another."""


def ssh_target(lab: Lab, alias: str, **more: Any) -> dict[str, Any]:
    """What the configuration says of a host of the lab."""
    return {
        "launcher": "ssh",
        "engine": "reference",
        "ssh_host": alias,
        "ssh_config": str(lab.client_config),
        "scope": "system",
        "root": ENVIRONMENTS,
        "start_timeout_s": 60,
        "stop_grace_s": 5,
        "lease_ttl_s": TTL_S,
        "lease_wait_s": 120,
        "reconnect_s": 60,
        **more,
    }


def one_host(lab: Lab, alias: str, **more: Any) -> dict[str, Any]:
    """A configuration that measures on one host of the lab."""
    block = {**CONFIG["sweep"][0], "target": alias}
    return {**CONFIG, "targets": {alias: ssh_target(lab, alias, **more)}, "sweep": [block]}


def recorded(clone: Clone, folder: Path, target: str, **more: Any) -> Clone:
    """A copy of a measured clone that knows its targets, and has measured nothing.

    It is to measure a short cell, `first`, and a long one, `second`, on one start of one server on `target`, of which
    its configuration says `more`.
    """
    copy = clone.duplicate(folder)
    for measured in ("store", "cells", "tables", "logs/servers"):
        shutil.rmtree(copy.root / "results" / measured)
    copy.config["targets"] = {target: {**copy.config["targets"][target], **more}}
    copy.config["workloads"]["first"]["max_tokens"] = 24
    copy.config["workloads"]["second"] |= {"max_tokens": 1500, "ignore_eos": True}
    copy.config["sweep"] = [{**copy.block, "target": target, "method": "DDTREE", "workload": ["first", "second"]}]
    return copy


def start_measuring(clone: Clone) -> subprocess.Popen[str]:
    """Start to measure what a clone lacks, as Snakemake's jobs do, in a process group of its own."""
    clone.write_config()
    return subprocess.Popen(
        [sys.executable, "-c", MEASURE],
        cwd=clone.root,
        env=clone.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def measure(clone: Clone, status: int = 0) -> str:
    """Measure what a clone lacks, see that it ends with `status`, and return what was printed."""
    process = start_measuring(clone)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        kill_all(clone)
    assert process.returncode == status, output
    return output


def kill_all(clone: Clone) -> None:
    """Kill every process of this machine that works for a clone, at once: none of them can end anything in order."""
    processes = [process for process in clone.processes() if is_of_this_machine(process)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def is_of_this_machine(process: psutil.Process) -> bool:
    """False for a process of a host, which can be seen from here."""
    own, its = (Path("/proc", str(pid), "ns", "pid") for pid in ("self", process.pid))
    with contextlib.suppress(OSError):
        return own.readlink() == its.readlink()
    return False


@contextlib.contextmanager
def power_cut(clone: Clone, host: Host) -> Iterator[None]:
    """Cut the power of the machine that measures: nothing of it is left, and the host is not told."""
    with host.link_cut():
        kill_all(clone)
        yield


def units(host: Host, pattern: str = "ddtree-bench-*") -> list[str]:
    """The units on a host that run or are about to."""
    states = "--state=active,activating,deactivating,reloading"
    told = host.exec("systemctl", "list-units", "--plain", "--no-legend", states, "--", pattern)
    return [line.split()[0] for line in told.splitlines()]


def server_processes(host: Host) -> list[str]:
    """The servers on a host, by process."""
    return host.exec("pgrep", "-af", "ddtree_reference serve", check=False).splitlines()


def journal(host: Host, *matches: str) -> list[dict[str, Any]]:
    """The entries of a host's journal that match."""
    told = host.exec("journalctl", "--quiet", "--no-pager", "--output=json", *matches)
    return [json.loads(line) for line in told.splitlines()]


def logins(host: Host) -> int:
    """How many connections a host's SSH server has accepted."""
    return sum("Accepted publickey" in str(entry["MESSAGE"]) for entry in journal(host, "_COMM=sshd"))


def lease_spans(host: Host, workflow: Path) -> list[tuple[float, float]]:
    """From when to when each lease of a workflow on a host was held, seconds since 1970, in order."""
    began: dict[str, float] = {}
    spans = []
    for entry in journal(host, f"MESSAGE_ID={UNIT_STARTED}", f"MESSAGE_ID={UNIT_STOPPED}"):
        unit, moment = entry.get("UNIT", ""), int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        if entry["MESSAGE_ID"] == UNIT_STARTED and unit.startswith(KEEPERS) and str(workflow) in entry["MESSAGE"]:
            began[unit] = moment
        elif unit in began:
            spans.append((began.pop(unit), moment))
    assert not began, f"still held: {began}"
    return sorted(spans)
