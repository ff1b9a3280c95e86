"""The dead man's switch: whichever process is killed, nothing is left and the target is free again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import PATIENCE_S, Owner, alive, end, eventually

from ddtree_bench.targets import lease, watchdog
from ddtree_bench.targets.local import LocalLauncher


@pytest.fixture
def start_owner(tmp_path: Path) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def start(*arguments: str, **options: bool) -> Owner:
        owners.append(Owner(tmp_path, *arguments, **options))
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


def is_free(directory: Path) -> bool:
    try:
        lease.acquire("test", directory, run="next").release()
    except lease.TargetBusy:
        return False
    return True


def state(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "server.state.json").read_text()))


def test_a_killed_owner(start_owner: Callable[..., Owner], tmp_path: Path) -> None:
    child = tmp_path / "child.pid"
    owner = start_owner("--ignore-term", "--child-pid-file", str(child))
    pids = [*owner.pids, int(child.read_text())]
    end(owner.process.pid)
    owner.process.wait()
    assert all(alive(pid) for pid in pids)
    with pytest.raises(lease.TargetBusy, match="run owner"):
        lease.acquire("test", tmp_path, run="next")
    assert eventually(lambda: not any(alive(pid) for pid in pids))
    assert eventually(lambda: is_free(tmp_path), 2)
    assert state(tmp_path)["reason"] == "lease" and state(tmp_path)["signal"] == signal.SIGKILL
    assert "lease has not been renewed" in (tmp_path / "server.log").read_text()


def test_a_stopped_owner_loses_its_server(start_owner: Callable[..., Owner], tmp_path: Path) -> None:
    owner = start_owner()
    os.kill(owner.process.pid, signal.SIGSTOP)
    assert eventually(lambda: not any(alive(pid) for pid in owner.pids))
    assert state(tmp_path)["reason"] == "lease"
    os.kill(owner.process.pid, signal.SIGCONT)
    owner.process.terminate()
    assert owner.process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_a_killed_watchdog_and_owner(start_owner: Callable[..., Owner], tmp_path: Path) -> None:
    owner = start_owner("--ignore-term")
    for pid in (owner.pids[0], owner.process.pid):
        end(pid)
    owner.process.wait()
    assert eventually(lambda: not any(alive(pid) for pid in owner.pids), 5)
    assert is_free(tmp_path)


def test_what_escapes_when_both_are_killed_is_ended_by_the_next_run(
    start_owner: Callable[..., Owner], tmp_path: Path
) -> None:
    pid_file = tmp_path / "child.pid"
    owner = start_owner("--child-pid-file", str(pid_file))
    child = int(pid_file.read_text())
    for pid in (owner.pids[0], owner.process.pid):
        end(pid)
    owner.process.wait()
    assert eventually(lambda: not alive(owner.pids[1]), 5)
    with LocalLauncher(tmp_path, "test").acquire("next", 5, print):
        assert not alive(child)


def test_a_lost_lease_file(start_owner: Callable[..., Owner], tmp_path: Path) -> None:
    owner = start_owner()
    (tmp_path / "test.lease").unlink()
    assert eventually(lambda: not any(alive(pid) for pid in owner.pids))
    assert state(tmp_path)["reason"] == "lease"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_at_once(
    start_owner: Callable[..., Owner], tmp_path: Path, number: signal.Signals
) -> None:
    owner = start_owner()
    owner.process.send_signal(number)
    owner.process.send_signal(number)
    assert owner.process.wait(PATIENCE_S) == 128 + number
    assert not any(alive(pid) for pid in owner.pids)
    assert state(tmp_path)["reason"] == "requested"
    assert is_free(tmp_path)


def test_the_age_of_a_lease_that_is_gone_or_anothers_grows(tmp_path: Path) -> None:
    path = tmp_path / "x.lease"
    reader = watchdog.LeaseReader(path, "mine")
    path.write_text(json.dumps({"token": "mine", "renewed_at": 100.0}))
    old = reader.age()
    path.write_text(json.dumps({"token": "another", "renewed_at": 1e12}))
    assert reader.age() >= old
    path.unlink()
    assert reader.age() >= old


def test_it_needs_the_standard_library_alone() -> None:
    source = Path(watchdog.__file__).read_text()
    assert "ddtree_bench" not in source and "psutil" not in source
