"""Checks of a host that is reached over SSH: the login, the way there, and its systemd."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, Queue

from paramiko import ChannelException, SSHException
from paramiko.common import OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

from ddtree_bench.environments.recipes import wheels_tag
from ddtree_bench.launchers import target_launcher
from ddtree_bench.project import Report
from ddtree_bench.target_checks.findings import Finding
from ddtree_bench.target_checks.planned import PlannedTarget
from ddtree_bench.targets.launcher import Launcher, Stream, TargetError
from ddtree_bench.targets.ssh.interpreter import ANY, found_python
from ddtree_bench.targets.ssh.launcher import SshLauncher
from ddtree_bench.targets.ssh.link import Link

COMMAND_TIMEOUT_S = 10.0
ANY_PORT = 9
"""The port that is asked for where servers take any: discard, which hardly a host has."""

FAR_S = 0.005
"""A round trip that is longer is worth a note where it is in every latency."""

PINGS = 5
PING_TIMEOUT_S = 5.0


def host_launcher(target: PlannedTarget, report: Report) -> SshLauncher:
    """Return the launcher of a host, whose connection the caller closes. Raises ConnectionFailed for no host's name."""
    launcher = target_launcher(target.project, target.name, report)
    assert isinstance(launcher, SshLauncher)
    return launcher


def check_host(target: PlannedTarget, launcher: SshLauncher) -> Iterator[Finding]:
    """Yield what is found of the way to a host and of what runs servers on it.

    Raises TargetError when it cannot be reached.
    """
    launcher.run_command(["true"], timeout_s=COMMAND_TIMEOUT_S)
    there = launcher.host.destination
    yield target.finding("reachable", "ok", f"{there.user}@{there.host}, port {there.port}")
    yield _round_trip(target, round_trip_s(launcher))
    yield _forwarding(target, launcher)
    yield _rights(target, launcher)
    yield from _pythons(target, launcher)


def round_trip_s(launcher: Launcher) -> float:
    """Return the shortest of some round trips to a command on a target, seconds. Raises TargetError."""
    echoed: Queue[str] = Queue()
    stream = launcher.open_stream(["cat"], echoed.put)
    try:
        return min(_ping(stream, echoed) for _ in range(PINGS))
    except Empty:
        raise TargetError(f"a command there gave nothing back within {PING_TIMEOUT_S:.0f} s; try again") from None
    finally:
        stream.close()


def _ping(stream: Stream, echoed: Queue[str]) -> float:
    began = time.monotonic()
    stream.send("ping")
    echoed.get(timeout=PING_TIMEOUT_S)
    return time.monotonic() - began


def _round_trip(target: PlannedTarget, seconds: float) -> Finding:
    words = f"{seconds * 1000:.1f} ms"
    if target.spec.client == "here" and seconds > FAR_S:
        remedy = f"targets.{target.name}.client: target measures without it"
        return target.finding("round trip", "note", f"{words}, which is in every latency", remedy)
    return target.finding("round trip", "ok", words)


def _forwarding(target: PlannedTarget, launcher: SshLauncher) -> Finding:
    """Servers are asked, and by a client on this machine measured, through a port forward of OpenSSH."""
    address, port = launcher.host.place.address, target.spec.port or ANY_PORT
    if launcher.host.connection.repeated(lambda link: _is_forwarded(link, (address, port))):
        return target.finding("forwarding", "ok", f"the host's sshd opens connections to {address}")
    remedy = "set `AllowTcpForwarding local` in its sshd_config, and no PermitOpen that leaves this out"
    return target.finding("forwarding", "problem", f"the host's sshd forwards nothing to {address}:{port}", remedy)


def _is_forwarded(link: Link, there: tuple[str, int]) -> bool:
    """Whether a host's sshd would connect to an address there; that nobody listens on it is no refusal of sshd's."""
    try:
        link.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=COMMAND_TIMEOUT_S).close()
    except ChannelException as error:
        return error.code != OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
    except (SSHException, OSError, EOFError) as error:
        raise TargetError(f"whether the host forwards to {there[0]} cannot be told: {error}; try again") from None
    return True


def _rights(target: PlannedTarget, launcher: SshLauncher) -> Finding:
    try:
        launcher.host.systemd.require_rights()
    except TargetError as error:
        return target.finding("rights", "problem", str(error))
    return target.finding("rights", "ok", f"systemd, scope {target.spec.scope}")


def _pythons(target: PlannedTarget, launcher: SshLauncher) -> Iterator[Finding]:
    """Of the package's own programs and of each environment: a Python that is there, or can be sent."""
    project = target.project
    environments = (project.environment(target.name, engine) for engine in target.engines)
    for tag in dict.fromkeys([ANY, *map(wheels_tag, environments)]):
        try:
            found = found_python(launcher.host.connection, launcher.host.root, tag)
        except TargetError as error:
            yield target.finding("Python", "problem", str(error))
        else:
            yield target.finding("Python", "ok", f"{tag}: {found or 'none there, so that of this machine is sent'}")
