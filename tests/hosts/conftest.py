"""What tests on real hosts share: an SSH server, hosts with systemd, a virtual machine; skipped where there are none.

With DDTREE_BENCH_REQUIRE_LAB=1 a test whose hosts cannot be made here fails instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import needs
import pytest
from clone import REPOSITORY, Clone
from lab import ENVIRONMENTS, Lab
from launching import Ground
from nspawn import Host
from remote import kill_all, one_host, ssh_target
from root_folder import lab_folder
from sshd import SshServer
from vm import VirtualMachine

from ddtree_bench.deployment import confirm_deployment
from ddtree_bench.environments.recipes import CLIENT
from ddtree_bench.launchers import target_launcher
from ddtree_bench.project import open_project


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder: `-m "not hosts"` leaves them out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("hosts")


def require(lacking: str | None) -> None:
    """Skip the test when this machine lacks something, or fail it where the lab is required."""
    if lacking is None:
        return
    if os.environ.get("DDTREE_BENCH_REQUIRE_LAB") == "1":
        pytest.fail(f"test hosts: {lacking}", pytrace=False)
    pytest.skip(f"test hosts: {lacking}")


@pytest.fixture
def lab_sshd(tmp_path: Path) -> Iterator[SshServer]:
    """An SSH server of the test's own on loopback, running."""
    require(needs.missing_commands(needs.SSHD))
    with SshServer(tmp_path / "sshd") as server:
        yield server


@pytest.fixture(scope="module")
def shared_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """An SSH server for those tests of a module that leave it as it is."""
    require(needs.missing_commands(needs.SSHD))
    with SshServer(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The session's lab; hosts that a test starts in it stay until the session's end."""
    require(needs.missing_for_hosts())
    with Lab(tmp_path_factory.mktemp("lab"), lab_folder()) as lab:
        yield lab


@pytest.fixture
def make_host(lab: Lab) -> Iterator[Callable[..., Host]]:
    """`lab.start` for hosts of the test's own, which are removed at its end."""
    before = lab.machines.copy()
    yield lab.start
    lab.remove(*(machine for machine in lab.machines if machine not in before))


@pytest.fixture(scope="session")
def two_hosts(lab: Lab) -> tuple[Host, Host]:
    """Hosts `gpu1` and `gpu2`, which share a folder at ENVIRONMENTS that outlives the session."""
    shared = lab.cache / "environments"
    shared.mkdir(exist_ok=True)
    return lab.start("gpu1", bind={ENVIRONMENTS: shared}), lab.start("gpu2", bind={ENVIRONMENTS: shared})


@pytest.fixture(scope="session")
def vm(lab: Lab) -> VirtualMachine:
    """The virtual machine `vm`, whose systemd has all of cgroup v2."""
    require(needs.missing_for_vm())
    return lab.start_vm()


@pytest.fixture(scope="session")
def deployed_hosts(two_hosts: tuple[Host, Host], lab: Lab) -> tuple[Host, Host]:
    """`two_hosts` with all environments in the folder that they share, into which one host at a time may deploy."""
    project = open_project(one_host(lab, "gpu1", client="target"), REPOSITORY, REPOSITORY / "results")
    launcher = target_launcher(project, "gpu1")
    for engine in ("reference", CLIENT):
        confirm_deployment(project, launcher, "gpu1", engine, print)
    launcher.close()
    return two_hosts


@pytest.fixture(scope="session")
def measured_hosts(
    deployed_hosts: tuple[Host, Host], lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clone]:
    """A clone in which the whole workflow has run on this machine and on hosts; tests that change it work on copies.

    AR and DDTREE on `local` and `gpu1`; DDTREE on `gpu2`, on `gpu2_inside`, which is `gpu2` with the client there, and
    on `inner`, a host behind `gpu1`.
    """
    inner = lab.start("inner", via=deployed_hosts[0], bind={ENVIRONMENTS: lab.cache / "environments"})
    clone = Clone.make(tmp_path_factory.mktemp("measured") / "clone")
    clone.config["targets"] |= {name: ssh_target(lab, name) for name in ("gpu1", "gpu2", inner.name)}
    clone.config["targets"]["gpu2_inside"] = ssh_target(lab, "gpu2", client="target")
    clone.config["workloads"]["first"] |= {"max_tokens": 500, "ignore_eos": True}
    clone.config["allow_missing_baseline"] = True
    clone.block.update(target=["local", "gpu1"], method=["AR", "DDTREE"])
    clone.config["sweep"].append({**clone.block, "target": ["gpu2", "gpu2_inside", inner.name], "method": "DDTREE"})
    try:
        # Infrastructure that fails is tried again, which would hide that it did.
        assert "Trying to restart" not in clone.measure("--cores", "6")
        yield clone
    finally:
        kill_all(clone)


@pytest.fixture
def ground(lab: Lab, host: Host, tmp_path: Path) -> Iterator[Ground]:
    """Launchers of the module's own host; nothing of theirs is left there at the test's end."""
    ground = Ground(lab, host, tmp_path)
    yield ground
    ground.close()
    assert ground.left() == ""
