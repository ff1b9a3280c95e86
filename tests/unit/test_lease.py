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


def test_the_owner_is_named_with_the_folder_of_the_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a workflow, ein Übel"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with lease.acquire("gpu", tmp_path, run="r") as held:
        assert f"run r, workflow {folder})" in lease.describe_holder(held.path)


def test_a_lease_that_an_older_release_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lease"
    content = {"user": "ann", "host": "h", "pid": 1, "run": "r", "since": "then", "renewed_at": time.monotonic()}
    path.write_text(json.dumps(content))
    assert lease.describe_holder(path) == "ann (host h, process 1, run r) since then"


def test_what_a_lease_file_says_does_nothing_to_a_terminal() -> None:
    told = lease.parse(json.dumps({"user": "\x1b[2J\x07ann", "host": "h\r\nx", "pid": ["\x9b"], "run": "ü 漢\u202e"}))
    words = lease.describe_owner(told)
    assert words.isprintable() and words.startswith("\\x1b[2J\\x07ann (host h\\r\\nx, process ") and "ü 漢" in words
    for nothing in ("", "[]", "7", "{", '{"renewed_at": "x"}', '{"ttl_s": []}'):
        assert lease.describe_owner(lease.parse(nothing)) == "an owner that has not signed it"


def test_how_long_a_lease_is_good_for_is_its_own(tmp_path: Path) -> None:
    with lease.acquire("gpu", tmp_path, run="r", ttl_s=60) as held:
        for age, stale in ((30, False), (61, True)):
            lease.sign(held.descriptor, held.owner, held.token, held.ttl_s, time.monotonic() - age)
            assert ("no longer renews" in lease.describe_holder(held.path)) is stale


def test_a_short_signature_leaves_nothing_of_a_long_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lease"
    descriptor = lease.take(path)
    for folder in ("/ü" * 2000, "/w"):
        owner = lease.Owner("ann", "h", 1, "r", "then", folder)
        lease.sign(descriptor, owner, "t", 10, time.monotonic())
        assert lease.read(path)["workflow"] == folder  # type: ignore[index]
    os.close(descriptor)


def test_a_shared_lease_keeps_out_only_those_who_want_it_alone(tmp_path: Path) -> None:
    with lease.acquire("gpu", tmp_path, run="first", shared=True):
        with lease.acquire("gpu", tmp_path, run="second", shared=True):
            pass
        with pytest.raises(lease.TargetBusy, match=r"run (first|second)"):
            lease.acquire("gpu", tmp_path, run="third")
    with lease.acquire("gpu", tmp_path, run="third"), pytest.raises(lease.TargetBusy, match="run third"):
        lease.acquire("gpu", tmp_path, run="fourth", shared=True)


def test_those_who_share_a_lease_sign_it_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lease"
    owners = [lease.Owner("u" * length, "h", 1, f"run-{length}", "then", "/w") for length in (1, 400)]
    held = [lease.Lease(path, lease.take(path, shared=True), owner, renew_every_s=0.001) for owner in owners]
    seen = set()
    deadline = time.monotonic() + 20
    while len(seen) < 2 and time.monotonic() < deadline:
        content = lease.read(path)
        assert content is not None and content["run"] == f"run-{len(content['user'])}"
        seen.add(content["run"])
    for one in held:
        one.release()
    assert seen == {"run-1", "run-400"}


def test_whether_a_lease_is_held_can_be_asked(tmp_path: Path) -> None:
    path = lease.path_of("gpu", tmp_path)
    assert not lease.is_held(path) and not path.exists()
    for shared in (False, True):
        with lease.acquire("gpu", tmp_path, run="r", shared=shared):
            assert lease.is_held(path)
        assert not lease.is_held(path)


def test_somebody_who_only_asks_is_not_in_the_way(tmp_path: Path) -> None:
    path = lease.path_of("gpu", tmp_path)
    asking = lease.take(path)
    threading.Timer(lease.LOOK_S / 5, os.close, (asking,)).start()
    lease.acquire("gpu", tmp_path, run="r").release()
