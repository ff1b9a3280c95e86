"""The local launcher with real processes."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest
from processes import Owner, alive, end, eventually

from ddtree_bench.servers import api
from ddtree_bench.targets.launcher import Launch, PortInUse, StopFailed, TargetError
from ddtree_bench.targets.local import LocalLauncher, own_tools, server_environment

TINY = Path(__file__).with_name("tiny_server.py")


def launch(launcher: LocalLauncher, folder: Path, *arguments: str, port: int | None = None, **more: str) -> Launch:
    port = port or launcher.free_port()
    argv = (sys.executable, str(TINY), "--port", str(port), *arguments)
    return Launch("tiny", argv, port, folder / "server.log", env=more, stop_grace_s=1.0)


def start(launcher: LocalLauncher, folder: Path, *arguments: str, **more: str) -> int:
    launcher.start(launch(launcher, folder, *arguments, **more))
    assert eventually(lambda: api.health(launcher.base_url()))
    pid = launcher.state().pid
    assert pid is not None
    return pid


def test_start_and_stop(launcher: LocalLauncher, tmp_path: Path) -> None:
    pid = start(launcher, tmp_path)
    assert launcher.state().alive and os.getpgid(pid) == pid and os.getpgid(pid) != os.getpgid(0)
    ended = launcher.stop()
    assert not ended.alive and ended.signal == 15 and ended.reason == "requested"
    assert not alive(pid) and not api.health(launcher.base_url())
    assert launcher.stop() == ended


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(launcher: LocalLauncher, tmp_path: Path) -> None:
    pid_file = tmp_path / "child.pid"
    pid = start(launcher, tmp_path, "--ignore-term", "--child-pid-file", str(pid_file))
    child = int(pid_file.read_text())
    assert alive(child) and os.getsid(child) != os.getsid(pid)
    assert launcher.stop().signal == 9
    assert not alive(pid) and not alive(child)


def test_a_server_that_was_killed_leaves_nothing(launcher: LocalLauncher, tmp_path: Path) -> None:
    pid_file = tmp_path / "child.pid"
    pid = start(launcher, tmp_path, "--child-pid-file", str(pid_file))
    end(pid)
    assert eventually(lambda: not launcher.state().alive, 5)
    state = launcher.state()
    assert state.signal == 9 and state.reason == "exited" and "signal 9" in str(state)
    assert eventually(lambda: not alive(int(pid_file.read_text())), 10)


def test_a_killed_watchdog_takes_the_server_down_and_stop_finds_the_rest(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    pid_file = tmp_path / "child.pid"
    pid = start(launcher, tmp_path, "--ignore-term", "--child-pid-file", str(pid_file))
    watchdog = json.loads((tmp_path / "server.state.json").read_text())["watchdog_pid"]
    end(watchdog)
    assert eventually(lambda: not alive(pid), 5)
    assert launcher.state().reason == "watchdog killed" and not launcher.state().alive
    launcher.stop()
    assert not alive(int(pid_file.read_text()))


def test_a_server_that_ends_on_start_is_reported_with_its_log(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(launch(launcher, tmp_path, "--exit", "3"))
    assert eventually(lambda: not launcher.state().alive, 10)
    assert launcher.state().exit_code == 3 and "exit status 3" in str(launcher.state())
    assert launcher.log_tail(1) == "out of memory while capturing graphs"


def test_a_command_that_does_not_exist(launcher: LocalLauncher, tmp_path: Path) -> None:
    port = launcher.free_port()
    launcher.start(Launch("absent", (str(tmp_path / "absent"),), port, tmp_path / "server.log"))
    assert launcher.state().reason == "not started" and not launcher.state().alive
    assert "cannot start" in launcher.log_tail()


def test_a_port_in_use_is_refused_with_its_holder(launcher: LocalLauncher, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port}.*process {os.getpid()} "):
            launcher.start(launch(launcher, tmp_path, port=port))


def test_a_second_server_and_a_start_without_the_lease_are_refused(launcher: LocalLauncher, tmp_path: Path) -> None:
    start(launcher, tmp_path)
    with pytest.raises(TargetError, match="still runs"):
        launcher.start(launch(launcher, tmp_path))
    without = LocalLauncher(tmp_path / "leases", "other")
    with pytest.raises(TargetError, match="lease must be acquired"):
        without.start(launch(without, tmp_path))
    with without.acquire("test", 0, print):
        assert not without.state().alive
    with pytest.raises(TargetError, match="lease must be acquired"):
        without.start(launch(without, tmp_path))


def test_a_port_that_stays_in_use_after_the_stop_is_an_error(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree_bench.targets.local.END_TIMEOUT_S", 0.3)
    asked = launch(launcher, tmp_path, "--exit", "0")
    launcher.start(asked)
    assert eventually(lambda: not launcher.state().alive, 10)
    with socket.create_server(("127.0.0.1", asked.port)), pytest.raises(StopFailed, match=f"port {asked.port}"):
        launcher.stop()
    launcher.stop()


def test_the_environment_is_small_and_explicit(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    written = tmp_path / "environment.json"
    start(launcher, tmp_path, "--environment-file", str(written), EXTRA="yes")
    seen = json.loads(written.read_text())
    assert seen["EXTRA"] == "yes" and seen["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert seen["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert "OMP_NUM_THREADS" not in seen


def test_server_environment_prefers_what_the_launch_says() -> None:
    assert server_environment({"PATH": "/bin", "X": "1"}, {"PATH": "/opt"}) == {"PYTHONUNBUFFERED": "1", "PATH": "/opt"}


def test_commands(launcher: LocalLauncher) -> None:
    said: list[str] = []
    program = "import sys; print(input()); print('warn', file=sys.stderr); sys.exit(4)"
    result = launcher.run_command([sys.executable, "-c", program], timeout_s=20, stdin="hello\n", report=said.append)
    assert (result.exit_code, result.stdout, result.stderr) == (4, "hello\n", "warn\n")
    assert sorted(said) == ["hello", "warn"]


def test_a_command_that_takes_too_long_is_killed(launcher: LocalLauncher) -> None:
    with pytest.raises(TargetError, match="did not end within"):
        launcher.run_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert not [child for child in psutil.Process().children() if "time.sleep(60)" in " ".join(child.cmdline())]


def test_a_command_that_cannot_be_run_is_named(launcher: LocalLauncher) -> None:
    with pytest.raises(TargetError, match="cannot run /absent/program"):
        launcher.run_command(["/absent/program"], timeout_s=1)


def test_copies(launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    launcher.copy_in(tmp_path / "a", str(tmp_path / "b"))
    launcher.copy_out(str(tmp_path / "b" / "x"), tmp_path / "c" / "y")
    assert (tmp_path / "c" / "y").read_text() == "1"


def test_stop_all_stops_what_a_killed_measuring_process_left(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "--ignore-term")
    other = Owner(tmp_path / "elsewhere")
    try:
        end(owner.process.pid)
        owner.process.wait()
        stopped = LocalLauncher(tmp_path, "test").stop_all()
        assert len(stopped) == 1 and stopped[0].startswith("tiny (process")
        assert not any(alive(pid) for pid in owner.pids)
        assert all(alive(pid) for pid in other.pids)
        assert LocalLauncher(tmp_path, "test").stop_all() == []
    finally:
        owner.close()
        other.close()


def test_a_server_finds_the_tools_of_its_own_environment_first() -> None:
    assert own_tools("/env/bin/python", {"PATH": "/usr/bin:/bin"}) == {"PATH": "/env/bin:/usr/bin:/bin"}
