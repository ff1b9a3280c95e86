"""The launcher of each target, as the configuration describes it."""

from __future__ import annotations

from pathlib import Path

from ddtree_bench.project import Project, Report
from ddtree_bench.targets import lease
from ddtree_bench.targets.external import ExternalLauncher
from ddtree_bench.targets.launcher import Launcher, TargetError
from ddtree_bench.targets.lease import DEFAULT_DIRECTORY
from ddtree_bench.targets.local import LocalLauncher
from ddtree_bench.targets.ssh.place import HostPlace

MACHINE = "machine"
"""The lease on a machine: of the local launcher, and of the ssh launcher on its host."""

REMOTE_TTL_S = 60.0
"""How long a server on a host outlives its last renewed lease, unless the configuration says otherwise."""


def target_launcher(project: Project, target: str, report: Report = print) -> Launcher:
    """Return the launcher of a target; nothing is connected yet. Raises TargetError for a kind that is not there."""
    spec = project.config.targets[target]
    directory = Path(spec.lease_dir) if spec.lease_dir else DEFAULT_DIRECTORY
    if spec.launcher == "external":
        return ExternalLauncher(directory, spec.url or "")
    if spec.launcher == "ssh":
        # Its libraries take long to load, and most commands reach no host.
        from ddtree_bench.targets.ssh.launcher import SshLauncher

        return SshLauncher(host_place(project, target), MACHINE, report)
    if spec.launcher == "local":
        return LocalLauncher(directory, MACHINE, spec.lease_ttl_s or lease.TTL_S)
    raise TargetError(f"targets.{target}.launcher: {spec.launcher!r} does not exist yet; use local, ssh or external")


def host_place(project: Project, target: str) -> HostPlace:
    """Return what the configuration says of a host that is reached over SSH."""
    spec = project.config.targets[target]
    assert spec.ssh_host is not None and spec.scope is not None
    return HostPlace(
        name=target,
        ssh_host=spec.ssh_host,
        ssh_config=Path(spec.ssh_config).expanduser() if spec.ssh_config else None,
        scope=spec.scope,
        root=project.deploy_root(target),
        cache=project.folders.environments,
        lease_directory=spec.lease_dir or str(DEFAULT_DIRECTORY),
        lease_ttl_s=spec.lease_ttl_s or REMOTE_TTL_S,
        reconnect_s=spec.reconnect_s,
        address=spec.host,
        memory_max_bytes=None if spec.memory_max_gib is None else round(spec.memory_max_gib * 2**30),
    )
