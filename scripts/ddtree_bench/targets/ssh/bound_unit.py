"""The units of servers and load clients on a host: both end with the lease."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from ddtree_bench.environments.installer import ADOPTED_TOOLS
from ddtree_bench.targets.launcher import Launch
from ddtree_bench.targets.lease import LEASE_MARK, START_MARK
from ddtree_bench.targets.ssh.held_lease import HeldLease
from ddtree_bench.targets.ssh.host import RemoteHost
from ddtree_bench.targets.ssh.unit import Unit

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLIENT_GRACE_S = 10.0

START_LENGTH = 40
"""Characters of a log's name that tell one start from another: its end, which has the start's id."""


def server_unit(host: RemoteHost, lease: HeldLease, launch: Launch) -> Unit:
    """The unit of a server; its tools are those of its own environment first."""
    programs = PurePosixPath(launch.argv[0]).parent
    start = launch.log_path.stem[-START_LENGTH:]
    env = {
        "HOME": host.login.home,
        "PATH": f"{programs}:{programs.with_name(ADOPTED_TOOLS)}:{SYSTEM_PATH}",
        "PYTHONUNBUFFERED": "1",
        # By these a local run on the host ends what a killed keeper has left.
        LEASE_MARK: lease.path,
        START_MARK: f"{launch.name}/{start}",
        **launch.env,
    }
    return Unit(
        name=f"ddtree-bench-server-{start}.service",
        description=f"ddtree-bench: server {launch.name}",
        argv=launch.argv,
        environment=env,
        binds_to=lease.unit,
        user=host.unit_user,
        stop_grace_s=launch.stop_grace_s,
        memory_max_bytes=host.place.memory_max_bytes,
    )


def client_unit(host: RemoteHost, lease: HeldLease, name: str, argv: tuple[str, ...], env: Mapping[str, str]) -> Unit:
    """The unit of a load client."""
    return Unit(
        name=client_unit_name(name),
        description=f"ddtree-bench: load client {name}",
        argv=argv,
        environment=env,
        binds_to=lease.unit,
        user=host.unit_user,
        stop_grace_s=CLIENT_GRACE_S,
    )


def client_unit_name(name: str) -> str:
    """What the unit of a load client is called."""
    return f"ddtree-bench-client-{name}.service"
