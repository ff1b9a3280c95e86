"""What the checks of targets say of real hosts: one clear error for each thing that is wrong, in seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configurations import tree, write_project
from lab import Lab
from nspawn import Host
from ssh_client import free_port, make_key
from sshd import SshServer

from ddtree_bench.project import Project, open_project
from ddtree_bench.target_checks import Finding, NotReady, check_target, check_targets

LONGEST_S = 15.0
"""What a user waits at most to hear what is wrong."""

ENVS = Path(__file__).parents[2] / "envs"


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    """A host with users who may do different things on it."""
    host = lab.start("checked")
    host.add_user("plain")
    host.add_user("lingering", lingering=True)
    host.add_user("admin", sudo=True)
    yield host
    lab.remove(host)


def project(tmp_path: Path, targets: dict[str, dict[str, Any]], **models: Any) -> Project:
    """A project with these targets of launcher ssh, all in one sweep."""
    config = tree()
    config["targets"] = {
        name: {"launcher": "ssh", "engine": "reference", "scope": "system", **keys} for name, keys in targets.items()
    }
    config["sweep"][0] |= {"target": list(targets)}
    config["models"]["toy"] |= models
    (tmp_path / "envs").symlink_to(ENVS)
    return open_project(config, write_project(tmp_path), tmp_path / "results")


def on(lab: Lab, host: Host, user: str = "root", **keys: Any) -> dict[str, dict[str, Any]]:
    return {"gpubox": {"ssh_host": f"{user}@{host.name}", "ssh_config": str(lab.client_config), **keys}}


def by(config: Path, **keys: Any) -> dict[str, dict[str, Any]]:
    return {"gpubox": {"ssh_host": "lab", "ssh_config": str(config), **keys}}


@contextmanager
def in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LONGEST_S


def refusal(project: Project) -> str:
    """The one problem that a target has, as a user is told it, in time."""
    with in_time(), pytest.raises(NotReady) as refused:
        check_target(project, "gpubox", print)
    first, *problems = str(refused.value).splitlines()
    assert first == "1 problem, nothing was started:", refused.value
    (problem,) = problems
    return problem


def levels(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in findings}


def require_untouched(host: Host) -> None:
    """Nothing of this workflow runs on a host or lies in systemd's folders there."""
    assert host.exec("systemctl", "list-units", "--all", "--no-legend", "ddtree-bench-*") == ""
    assert host.exec("find", "/run/systemd/system", "/run/user", "-name", "ddtree-bench-*") == ""


# --- The way there ---


def test_a_host_whose_key_nobody_has_confirmed(lab_sshd: SshServer, tmp_path: Path) -> None:
    lab_sshd.known_hosts.write_text("")
    said = refusal(project(tmp_path, by(lab_sshd.client_config())))
    assert "is not known" in said and "known_hosts" in said
    assert lab_sshd.known_hosts.read_text() == ""


def test_a_host_that_shows_another_key(lab_sshd: SshServer, tmp_path: Path) -> None:
    lab_sshd.rekey()
    said = refusal(project(tmp_path, by(lab_sshd.client_config())))
    assert "but known is" in said and f"ssh-keygen -f {lab_sshd.known_hosts} -R" in said


def test_a_key_that_the_host_does_not_take(lab_sshd: SshServer, tmp_path: Path) -> None:
    make_key(tmp_path / "other_key")
    alias = replace(lab_sshd.alias(), identity_file=tmp_path / "other_key")
    said = refusal(project(tmp_path, by(lab_sshd.client_config(alias))))
    assert str(tmp_path / "other_key") in said and "authorized_keys" in said


def test_a_port_on_which_nobody_answers(lab_sshd: SshServer, tmp_path: Path) -> None:
    said = refusal(project(tmp_path, by(lab_sshd.client_config(replace(lab_sshd.alias(), port=free_port())))))
    assert "refused" in said


def test_a_listener_that_says_nothing(lab_sshd: SshServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        alias = replace(lab_sshd.alias(), port=silent.getsockname()[1])
        refusal(project(tmp_path, by(lab_sshd.client_config(alias))))


def test_hosts_that_are_gone_are_told_of_at_once(lab: Lab, host: Host, tmp_path: Path) -> None:
    """Packets to them vanish; the checks of several such hosts take no longer than those of one."""
    targets = {name: on(lab, host)["gpubox"] for name in ("first", "second", "third")}
    opened = project(tmp_path, targets)
    with host.link_cut(), in_time():
        findings = check_targets(opened, print)
    told = sorted((finding.target, finding.what, finding.level) for finding in findings)
    assert told == [(name, "reachable", "problem") for name in sorted(targets)]


def test_a_machine_without_systemd(lab_sshd: SshServer, tmp_path: Path) -> None:
    if Path("/run/systemd/system").exists():
        pytest.skip("this machine was booted with systemd")
    said = refusal(project(tmp_path, by(lab_sshd.client_config(), root=str(tmp_path / "root"))))
    assert "targets.gpubox.scope" in said and "booted with systemd" in said


def test_an_sshd_that_forwards_nothing(lab: Lab, host: Host, tmp_path: Path) -> None:
    host.write_file("/etc/ssh/sshd_config.d/closed.conf", "AllowTcpForwarding no\n")
    host.exec("systemctl", "reload", "ssh")
    try:
        said = refusal(project(tmp_path, on(lab, host)))
    finally:
        host.exec("rm", "/etc/ssh/sshd_config.d/closed.conf")
        host.exec("systemctl", "reload", "ssh")
    assert "forwards nothing to 127.0.0.1" in said and "AllowTcpForwarding local" in said


# --- Rights ---


def test_a_login_without_root_for_the_scope_system(lab: Lab, host: Host, tmp_path: Path) -> None:
    said = refusal(project(tmp_path, on(lab, host, "plain")))
    assert "targets.gpubox.scope" in said and "NOPASSWD" in said and "scope: user" in said
    require_untouched(host)


def test_a_login_without_lingering_for_the_scope_user(lab: Lab, host: Host, tmp_path: Path) -> None:
    said = refusal(project(tmp_path, on(lab, host, "plain", scope="user")))
    assert "targets.gpubox.scope" in said and "loginctl enable-linger plain" in said
    require_untouched(host)


@pytest.mark.parametrize(("user", "scope"), [("root", "system"), ("admin", "system"), ("lingering", "user")])
def test_logins_that_may_run_servers(lab: Lab, host: Host, tmp_path: Path, user: str, scope: str) -> None:
    said: list[str] = []
    with in_time():
        findings = check_targets(project(tmp_path, on(lab, host, user, scope=scope)), said.append)
    assert {finding.level for finding in findings} <= {"ok", "note"}, findings
    assert {"reachable", "round trip", "forwarding", "rights", "Python", "tools", "room", "lease"} <= levels(
        findings
    ).keys()
    require_untouched(host)


# --- The machine ---


def test_a_disk_that_is_too_small(lab: Lab, host: Host, tmp_path: Path) -> None:
    with host.small_disk("/srv/small", 8):
        said = refusal(project(tmp_path, on(lab, host, root="/srv/small/ddtree-bench")))
    assert "/srv/small/ddtree-bench: needs" in said and "are free" in said and "`root`" in said


def test_a_root_that_the_login_may_not_write(lab: Lab, host: Host, tmp_path: Path) -> None:
    said = refusal(project(tmp_path, on(lab, host, "lingering", scope="user", root="/srv/nobody")))
    assert "/srv/nobody: nothing can be written there" in said and "Permission denied" in said


def on_sglang(lab: Lab, host: Host, tmp_path: Path, model: str, drafter: str) -> Project:
    drafted = {"name": "drafter", "revision": "1", "block_size": 8, "paths": {"gpubox": drafter}}
    targets = on(lab, host, engine="sglang", sglang_build="cpu", root="/srv/deployed")
    return project(tmp_path, targets, paths={"gpubox": model}, drafter=drafted)


def test_a_model_that_is_not_there(lab: Lab, host: Host, tmp_path: Path) -> None:
    host.write_file("/models/drafter/config.json", "{}")
    said = refusal(on_sglang(lab, host, tmp_path, "/models/none", "/models/drafter"))
    assert "models.toy.paths.gpubox: there is nothing at /models/none there" in said


def test_every_model_that_is_missing_is_named(lab: Lab, host: Host, tmp_path: Path) -> None:
    opened = on_sglang(lab, host, tmp_path, "/models/$(touch /tmp/injected)", "/models/'; touch /tmp/injected")
    with in_time(), pytest.raises(NotReady, match=r"(?s)2 problems.*models\.toy\.paths.*models\.toy\.drafter\.paths"):
        check_target(opened, "gpubox", print)
    assert host.exec("ls", "/tmp/injected", check=False) == ""


def test_a_port_that_a_stranger_has(lab: Lab, host: Host, tmp_path: Path) -> None:
    serve = "import socket, time; listener = socket.create_server(('127.0.0.1', 30123)); time.sleep(600)"
    host.exec("systemd-run", "--unit=stranger", "python3", "-c", serve)
    try:
        said = refusal(project(tmp_path, on(lab, host, port=30123)))
    finally:
        host.exec("systemctl", "stop", "stranger")
    assert "30123 is in use by process" in said and "python3 -c import socket" in said and "targets.gpubox.port" in said


def test_a_lease_that_somebody_holds(lab: Lab, host: Host, tmp_path: Path) -> None:
    content = '{"user": "ann", "host": "desk", "pid": 7, "run": "theirs", "since": "noon", "workflow": "/home/ann/w"}'
    host.write_file("/var/tmp/ddtree-bench/machine.lease", content, mode=0o666)
    host.exec("systemd-run", "--unit=holder", "flock", "/var/tmp/ddtree-bench/machine.lease", "sleep", "600")
    try:
        said = refusal(project(tmp_path, on(lab, host, lease_wait_s=0.0)))
    finally:
        host.exec("systemctl", "stop", "holder")
    assert "held by ann (host desk, process 7, run theirs" in said and "targets.gpubox.lease_wait_s" in said
