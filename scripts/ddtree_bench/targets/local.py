"""The local launcher: the server is a process group of this machine, under a watchdog."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any, Final

import psutil

from ddtree_bench.environments.installer import ADOPTED_TOOLS
from ddtree_bench.targets import commands, host_tools, lease, processes, watchdog
from ddtree_bench.targets.launcher import (
    CommandResult,
    Launch,
    Launcher,
    PortInUse,
    ServerState,
    StopFailed,
    TargetError,
)
from ddtree_bench.targets.lease import LEASE_MARK, START_MARK

PASSED_THROUGH = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "DDTREE_REFERENCE_FAULT")
WATCHDOG_KILLED: Final = "watchdog killed"
START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
STOP_ALL_TIMEOUT_S = 60.0


class LocalLauncher(Launcher):
    """Servers of this machine. One lease name and directory, one machine."""

    shares_files = True

    def __init__(self, lease_directory: Path, lease_name: str, lease_ttl_s: float = lease.TTL_S) -> None:
        self._lease_directory = lease_directory
        self._lease_name = lease_name
        self._lease_ttl_s = lease_ttl_s
        self._lease: lease.Lease | None = None
        self._launch: Launch | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._stopped = True

    def acquire(self, run: str, wait_s: float, report: Callable[[str], None]) -> lease.Lease:
        """Take the lease of this machine; the launcher starts servers under it until it is released.

        What a run under this lease has left whose watchdog was killed too is ended first.
        """
        self._lease = lease.acquire(
            self._lease_name, self._lease_directory, run=run, wait_s=wait_s, report=report, ttl_s=self._lease_ttl_s
        )
        _kill(self._started_under_lease())
        return self._lease

    def free_port(self) -> int:
        """A port of the loopback interface that nothing listens on now."""
        return processes.free_port()

    def start(self, launch: Launch) -> None:
        """Start the server under a watchdog of its own, which outlives this process for as long as it must."""
        if self._lease is None or self._lease.released:
            raise TargetError(f"server {launch.name}: the target's lease must be acquired before a server is started")
        if self._watchdog is not None and self._watchdog.poll() is None:
            raise TargetError(f"server {launch.name}: another server of this launcher still runs; stop it first")
        if not processes.is_free(launch.port):
            raise PortInUse(
                f"port {launch.port}, wanted by server {launch.name}, is in use by {processes.holder(launch.port)}; "
                "end that process or choose another port"
            )
        launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        launch.state_path.unlink(missing_ok=True)
        self._launch = launch
        self._mark = f"{launch.name}/{uuid.uuid4().hex}"
        self._stopped = False
        given = {**launch.env, **launch.private_env}
        marks = {START_MARK: self._mark, LEASE_MARK: str(self._lease.path)}
        with launch.log_path.open("ab") as log:
            self._watchdog = subprocess.Popen(
                self._watchdog_argv(launch, self._lease),
                env=server_environment(
                    os.environ, {**given, **own_tools(launch.argv[0], {**os.environ, **given}), **marks}
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self._lease.descriptor,),
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not launch.state_path.exists() and self._watchdog.poll() is None:
            if time.monotonic() > deadline:
                self.stop()
                raise TargetError(f"server {launch.name}: its watchdog did not start within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.01)

    def state(self) -> ServerState:
        """What the watchdog has recorded, and whether the watchdog itself is still there."""
        if self._launch is None or self._watchdog is None:
            return ServerState(alive=False)
        watchdog_gone = self._watchdog.poll() is not None
        recorded = _read_state(self._launch.state_path)
        phase = recorded.get("phase")
        reason = recorded.get("reason")
        if watchdog_gone and phase != "ended":
            reason = WATCHDOG_KILLED
        return ServerState(
            alive=phase == "running" and not watchdog_gone,
            pid=recorded.get("server_pid"),
            exit_code=recorded.get("exit_code"),
            signal=recorded.get("signal"),
            reason=reason,
        )

    def stop(self) -> ServerState:
        """Have the watchdog stop the server; kill what is left of both, and wait until the port is free."""
        if self._launch is None or self._watchdog is None:
            return self.state()
        if self._watchdog.poll() is None:
            self._watchdog.send_signal(signal.SIGTERM)
            try:
                self._watchdog.wait(self._launch.stop_grace_s + END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._watchdog.kill()
                self._watchdog.wait()
        if not self._stopped:
            self._end_stragglers()
            self._wait_for_port(self._launch)
            self._stopped = True
        return self.state()

    def stop_all(self) -> list[str]:
        """Stop the servers under this lease, of whichever measuring process, that this user started."""
        found = self._started_under_lease()
        names = {p.info["environ"][START_MARK].rpartition("/")[0]: p.pid for p in found}
        watchdogs = [p for p in found if watchdog.__file__ in (p.info["cmdline"] or [])]
        processes.terminate(watchdogs, STOP_ALL_TIMEOUT_S)
        _kill(found)
        return [f"{name} (process {pid})" for name, pid in sorted(names.items())]

    def base_url(self) -> str:
        """The loopback address of the server that was started last."""
        if self._launch is None:
            raise TargetError("no server has been started, so there is no address to reach it at")
        return f"http://{processes.HOST}:{self._launch.port}"

    def fetch_log(self) -> Path | None:
        """The log file, which is here already; None when nothing has been started."""
        return None if self._launch is None else self._launch.log_path

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log file; empty when there is none."""
        if self._launch is None or not self._launch.log_path.exists():
            return ""
        with self._launch.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - lines * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def python(self, tag: str) -> str:  # noqa: ARG002
        """The interpreter of this process: wheels are put together for no other."""
        return sys.executable

    def expand(self, path: str) -> str:
        """The absolute path, ~ resolved."""
        return str(Path(path).expanduser().absolute())

    def copy_in(self, source: Path, destination: str, report: Callable[[str], None] | None = None) -> None:  # noqa: ARG002
        """Copy a file or folder, unless source and destination are the same."""
        _copy(source, Path(destination))

    def copy_out(self, source: str, destination: Path) -> None:
        """Copy a file or folder, unless source and destination are the same."""
        _copy(Path(source), destination)

    def run_command(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str = "",
        report: Callable[[str], None] | None = None,
    ) -> CommandResult:
        """Run a command in the environment that servers get, to its end."""
        return commands.run(
            argv, timeout_s=timeout_s, stdin=stdin, report=report, env=server_environment(os.environ, {})
        )

    def open_stream(self, argv: Sequence[str], on_line: Callable[[str], None]) -> commands.LocalStream:
        """Start a command in the environment that servers get, and take its lines as they come."""
        return commands.LocalStream(argv, on_line, env=server_environment(os.environ, {}))

    def tools(self) -> str:
        """The folder that this package lies in: it is here already."""
        return str(host_tools.PACKAGE.parent)

    def _started_under_lease(self) -> list[psutil.Process]:
        return processes.marked(LEASE_MARK, str(lease.path_of(self._lease_name, self._lease_directory)))

    def _watchdog_argv(self, launch: Launch, held: lease.Lease) -> list[str]:
        # By file and isolated from the environment's packages: quick to start, and the same on a remote host.
        return [
            *(sys.executable, "-I", "-S", watchdog.__file__),
            *("--lease", str(held.path), "--token", held.token, "--ttl", str(self._lease_ttl_s)),
            *("--lease-fd", str(held.descriptor)),
            *("--grace", str(launch.stop_grace_s), "--state", str(launch.state_path)),
            *("--", *launch.argv),
        ]

    def _end_stragglers(self) -> None:
        """Kill what a killed watchdog could not; raises StopFailed for what cannot be killed."""
        remaining = processes.marked(START_MARK, self._mark)
        state = self.state()
        if state.reason == WATCHDOG_KILLED and state.pid is not None:
            # A process that renames itself (setproctitle) overwrites its environment: hence its session too.
            remaining += processes.in_session(state.pid)
        _kill(remaining)

    def _wait_for_port(self, launch: Launch) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        while not processes.is_free(launch.port):
            if time.monotonic() > deadline:
                holder = processes.holder(launch.port)
                raise StopFailed(f"port {launch.port} of the stopped server {launch.name} is in use by {holder}")
            time.sleep(0.1)


def server_environment(environ: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server: few variables of ours, so that a run does not depend on a user's shell."""
    passed = {name: environ[name] for name in PASSED_THROUGH if name in environ}
    return {"PYTHONUNBUFFERED": "1", **passed, **more}


def own_tools(program: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The search path of a server: the tools of its own environment first, such as the ninja of its wheels.

    Then those of the installation that the environment adopts, unless they are on the path.
    """
    own, path = Path(program).parent, environ.get("PATH", os.defpath)
    adopted = own.with_name(ADOPTED_TOOLS)
    more = [str(adopted.resolve())] if adopted.is_dir() and str(adopted.resolve()) not in path.split(os.pathsep) else []
    return {"PATH": os.pathsep.join((str(own), *more, path))}


def _kill(remaining: list[psutil.Process]) -> None:
    left = processes.kill(remaining, END_TIMEOUT_S)
    if left:
        raise StopFailed(f"processes of a stopped server remain: {', '.join(str(p.pid) for p in left)}; end them")


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = loads(path.read_text())
    except (FileNotFoundError, JSONDecodeError):
        return {}
    return dict(state)


def _copy(source: Path, destination: Path) -> None:
    if source.resolve() == destination.resolve():
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, destination, dirs_exist_ok=True)
    else:
        shutil.copy2(source, destination)
