"""The lease: one run at a time on a target, whatever happens to its owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ddtree_bench.targets import lease
from ddtree_bench.targets.launcher import TargetError


def ignore(_: str) -> None:
    return


def test_a_second_owner_fails_with_the_first_owners_name(tmp_path: Path) -> None:
    with lease.acquire("gpu", tmp_path, run="first") as held:
        with pytest.raises(lease.TargetBusy) as refused:
            lease.acquire("gpu", tmp_path, run="second")
        message = str(refused.value)
        assert held.owner.user in message
        assert "run first" in message and str(os.getpid()) in message and str(tmp_path / "gpu.lease") in message


def test_a_second_owner_waits_and_is_told_for_whom(tmp_path: Path) -> None:
    first = lease.acquire("gpu", tmp_path, run="first")
    said: list[str] = []
    threading.Timer(0.7, first.release).start()
    with lease.acquire("gpu", tmp_path, run="second", wait_s=20, report=said.append) as second:
        assert second.owner.run == "second"
    assert len(said) == 1 and "run first" in said[0]


def test_leases_of_other_names_are_independent(tmp_path: Path) -> None:
    with lease.acquire("a", tmp_path, run="x"), lease.acquire("b", tmp_path, run="y") as other:
        assert other.path == tmp_path / "b.lease"


def test_the_lease_is_renewed_while_held_and_no_longer_after(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "gpu.lease", os.O_RDWR | os.O_CREAT)
    held = lease.Lease(tmp_path / "gpu.lease", descriptor, lease.Owner.this_process("r"), renew_every_s=0.05)
    before = lease.read(held.path)
    time.sleep(0.3)
    during = lease.read(held.path)
    held.release()
    at_release = lease.read(held.path)
    time.sleep(0.3)
    assert before and during and at_release
    assert during["renewed_at"] > before["renewed_at"] and during["token"] == held.token
    assert lease.read(held.path) == at_release


def test_a_stale_or_broken_file_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lease"
    path.write_text('{"user": "somebody", "renewed_at": 1e12')
    with lease.acquire("gpu", tmp_path, run="new") as held:
        content = json.loads(path.read_text())
        assert content["token"] == held.token and content["run"] == "new"


def test_a_lease_file_that_was_removed_is_not_mistaken_for_the_one_that_is_locked(tmp_path: Path) -> None:
    with lease.acquire("gpu", tmp_path, run="first") as first:
        first.path.unlink()
        with lease.acquire("gpu", tmp_path, run="second") as second:
            assert not os.path.samestat(os.fstat(first.descriptor), os.fstat(second.descriptor))


def test_the_lock_lasts_as_long_as_a_process_that_inherited_it(tmp_path: Path) -> None:
    held = lease.acquire("gpu", tmp_path, run="first")
    heir = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(held.descriptor,), text=True
    )
    held.release()
    try:
        with pytest.raises(lease.TargetBusy):
            lease.acquire("gpu", tmp_path, run="second")
    finally:
        heir.communicate("\n")
    with lease.acquire("gpu", tmp_path, run="second", wait_s=10, report=ignore) as second:
        assert second.owner.run == "second"


def test_an_owner_that_no_longer_renews_is_said_to(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lease"
    content = {"user": "ann", "host": "h", "pid": 1, "run": "r", "since": "then", "renewed_at": time.monotonic() - 60}
    path.write_text(json.dumps(content))
    assert "ann" in lease.describe_holder(path) and "no longer renews" in lease.describe_holder(path)


def test_the_directory_is_shared_between_users(tmp_path: Path) -> None:
    with lease.acquire("gpu", tmp_path / "leases", run="r") as held:
        assert (tmp_path / "leases").stat().st_mode & 0o7777 == 0o1777
        assert held.path.stat().st_mode & 0o777 == 0o666


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="file is not a folder"):
        lease.acquire("gpu", tmp_path / "file", run="r")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_users_lease_is_respected_and_can_be_taken_over() -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        directory = Path(folder) / "leases"

        def as_nobody() -> int:
            child = os.fork()
            if child == 0:
                os.setgid(nobody)
                os.setuid(nobody)
                try:
                    lease.acquire("gpu", directory, run="theirs").release()
                    os._exit(0)
                except lease.TargetBusy as refused:
                    os._exit(1 if "run ours" in str(refused) else 2)
                finally:
                    os._exit(3)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        with lease.acquire("gpu", directory, run="ours"):
            assert as_nobody() == 1
        assert as_nobody() == 0
        with lease.acquire("gpu", directory, run="ours again") as held:
            assert held.path.stat().st_uid == 0
