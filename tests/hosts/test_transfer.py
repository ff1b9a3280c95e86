"""Copies to and from a host, against a real SSH server on loopback: only what differs, from where a cut left off."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sshd import SshServer

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh import progress
from ddtree_bench.targets.ssh.connection import Connection
from ddtree_bench.targets.ssh.destination import resolve
from ddtree_bench.targets.ssh.failures import LinkLost
from ddtree_bench.targets.ssh.transfer import download, upload

MB = 1_000_000
LOST_ON_THE_WAY = 6 * MB
"""What the client, the kernel and the server may hold of a copy whose link is cut."""


@contextmanager
def connected(server: SshServer, reconnect_s: float = 30.0) -> Iterator[Connection]:
    connection = Connection(resolve("lab", server.client_config()), reconnect_s=reconnect_s, report=print)
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture(scope="module")
def shared(shared_sshd: SshServer) -> Iterator[Connection]:
    with connected(shared_sshd) as connection:
        yield connection


@pytest.fixture
def said_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is said after every block."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)


def noise(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(size).randbytes(size))
    return path


def sent(connection: Connection, source: Path, destination: str) -> int:
    """How many bytes went over the link for an upload."""
    before = connection.bytes_copied
    upload(connection, source, destination, print)
    return connection.bytes_copied - before


def fetched(connection: Connection, source: str, destination: Path) -> int:
    """How many bytes went over the link for a download."""
    before = connection.bytes_copied
    download(connection, source, destination, print)
    return connection.bytes_copied - before


def part_there(file: Path, copied: Path) -> Path:
    """Where an upload of a file keeps what has arrived of it."""
    return copied.with_name(f"{copied.name}.{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}.part")


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Content and executability of the files of a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), os.access(path, os.X_OK))
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with what makes copies difficult."""
    folder = tmp_path / "here"
    noise(folder / "wheel.whl", 300_000)
    noise(folder / "deep/er/it's a $name\nü", 10)
    noise(folder / "-n", 5)
    noise(folder / "empty", 0)
    (folder / "bin").mkdir()
    (folder / "bin/python3.11").write_text("#!/bin/sh\n")
    (folder / "bin/python3.11").chmod(0o755)
    (folder / "bin/python3").symlink_to("python3.11")
    return folder


def test_a_folder_arrives_and_is_not_sent_again(shared: Connection, source: Path, tmp_path: Path) -> None:
    there = tmp_path / "there/ü $x"
    assert sent(shared, source, str(there)) == 300_000 + 10 + 5 + 2 * 10
    assert tree(there) == tree(source) and os.access(there / "bin/python3", os.X_OK)
    assert sent(shared, source, f"{there}/") == 0
    # Of the same size but another content, not executable any more, not wanted: the last is left alone.
    (there / "-n").write_bytes(b"other")
    (there / "bin/python3").chmod(0o644)
    (there / "more").write_text("kept")
    assert sent(shared, source, str(there)) == 5
    (there / "more").unlink()
    assert tree(there) == tree(source)


def test_a_folder_comes_back_and_is_not_fetched_again(shared: Connection, source: Path, tmp_path: Path) -> None:
    here = tmp_path / "back"
    assert fetched(shared, str(source), here) == 300_035 and tree(here) == tree(source)
    assert fetched(shared, str(source), here) == 0
    (here / "-n").write_bytes(b"other")
    assert fetched(shared, str(source), here) == 5 and tree(here) == tree(source)


def test_single_files_and_empty_folders(shared: Connection, tmp_path: Path) -> None:
    file = noise(tmp_path / "file", 100)
    upload(shared, file, f"{tmp_path}/a/b/renamed", None)
    download(shared, f"{tmp_path}/a/b/renamed", tmp_path / "c/back", None)
    assert (tmp_path / "c/back").read_bytes() == file.read_bytes()
    (tmp_path / "empty").mkdir()
    upload(shared, tmp_path / "empty", f"{tmp_path}/d/e", None)
    download(shared, f"{tmp_path}/d/e", tmp_path / "f/g", None)
    assert (tmp_path / "d/e").is_dir() and (tmp_path / "f/g").is_dir()


def test_what_is_not_there_is_said(shared: Connection, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="nothing is not there"):
        upload(shared, tmp_path / "nothing", f"{tmp_path}/x", None)
    with pytest.raises(TargetError, match="lab: /no/such is not there"):
        download(shared, "/no/such", tmp_path / "x", None)


def test_names_that_are_not_utf8_are_refused_in_words(shared: Connection, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / os.fsdecode(b"caf\xe9")).touch()
    with pytest.raises(TargetError, match=r"here/caf.*: the name is not UTF-8"):
        upload(shared, tmp_path / "here", f"{tmp_path}/there", None)
    with pytest.raises(TargetError, match=r"lab: .*here/caf.*: the name is not UTF-8"):
        download(shared, f"{tmp_path}/here", tmp_path / "back", None)


def test_two_who_send_different_files_to_one_place_do_not_mix_them(
    lab_sshd: SshServer, tmp_path: Path, said_often: None
) -> None:
    first, second, there = noise(tmp_path / "first", 6 * MB), noise(tmp_path / "second", 8 * MB), tmp_path / "there"
    seen: list[bytes] = []

    def meanwhile(_: str) -> None:
        if not seen:
            with connected(lab_sshd) as other:
                upload(other, second, str(there), None)
            seen.append(there.read_bytes())

    with connected(lab_sshd) as connection:
        upload(connection, first, str(there), meanwhile)
    assert seen == [second.read_bytes()] and there.read_bytes() == first.read_bytes()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("copy", ["upload", "download"])
def test_a_cut_in_the_middle_costs_only_what_was_on_the_way(
    lab_sshd: SshServer, tmp_path: Path, said_often: None, copy: str
) -> None:
    file, copied = noise(tmp_path / "big", 40 * MB), tmp_path / "copied"
    said: list[str] = []
    with connected(lab_sshd) as connection:
        copied_by(copy)(connection, file, copied, cutting(lab_sshd, 15, said))
        assert 40 * MB <= connection.bytes_copied < 40 * MB + LOST_ON_THE_WAY
    assert copied.read_bytes() == file.read_bytes() and not list(tmp_path.glob("*.part"))
    # The second attempt speaks of the rest only.
    total = re.search(r"of (\d+) MB", said[-1])
    assert total is not None and 15 < int(total[1]) < 35


def cutting(server: SshServer, after: int, said: list[str]) -> Callable[[str], None]:
    """A report that cuts the link once, when so many MB are copied."""
    cut: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        done = re.search(r"\((\d+) of", line)
        if not cut and done is not None and int(done[1]) >= after:
            cut.append(line)
            server.end_sessions()

    return report


def copied_by(copy: str) -> Callable[..., None]:
    if copy == "upload":
        return lambda connection, a, b, report: upload(connection, a, str(b), report)
    return lambda connection, a, b, report: download(connection, str(a), b, report)


def part_of(copy: str, file: Path, copied: Path) -> Path:
    return part_there(file, copied) if copy == "upload" else copied.with_name(f"{copied.name}.part")


def test_a_copy_goes_on_in_a_later_process(lab_sshd: SshServer, tmp_path: Path, said_often: None) -> None:
    file, copied = noise(tmp_path / "big", 20 * MB), tmp_path / "copied"
    with connected(lab_sshd, reconnect_s=0) as connection, pytest.raises(LinkLost):
        upload(connection, file, str(copied), cutting(lab_sshd, 12, []))
    left = part_there(file, copied).stat().st_size
    assert not copied.exists() and 2 * MB < left < 20 * MB
    with connected(lab_sshd) as connection:
        assert sent(connection, file, str(copied)) == 20 * MB - left
    assert copied.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("copy", ["upload", "download"])
def test_what_an_earlier_attempt_left_is_used_if_it_agrees(shared: Connection, tmp_path: Path, copy: str) -> None:
    file, copied = noise(tmp_path / "big", 6 * MB), tmp_path / "copied"
    part, before = part_of(copy, file, copied), shared.bytes_copied
    part.write_bytes(file.read_bytes()[: 4 * MB])
    copied_by(copy)(shared, file, copied, None)
    assert shared.bytes_copied - before == 2 * MB and not part.exists()
    assert copied.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("left", ["wrong", "longer", "complete"])
@pytest.mark.parametrize("copy", ["upload", "download"])
def test_what_an_earlier_attempt_left_wrong_is_replaced(
    shared: Connection, tmp_path: Path, copy: str, left: str
) -> None:
    file, copied = noise(tmp_path / "big", 2 * MB), tmp_path / "copied"
    part, before, good = part_of(copy, file, copied), shared.bytes_copied, file.read_bytes()
    part.write_bytes({"wrong": good[:MB] + b"x" + good[MB + 1 : MB + 2], "longer": good + b"x", "complete": good}[left])
    copied_by(copy)(shared, file, copied, None)
    assert copied.read_bytes() == good and not part.exists()
    if copy == "upload" or left != "wrong":
        assert shared.bytes_copied - before == (0 if left == "complete" else 2 * MB)


def test_a_file_that_grows_while_it_is_fetched_is_not_taken_for_whole(
    shared: Connection, tmp_path: Path, said_often: None
) -> None:
    log = noise(tmp_path / "log", 5 * MB)

    def change(_: str) -> None:
        with log.open("r+b") as file:
            file.seek(-10, os.SEEK_END)
            file.write(os.urandom(10))

    with pytest.raises(TargetError, match="changes while it is copied"):
        download(shared, str(log), tmp_path / "back", change)
    assert not (tmp_path / "back").exists()


def test_progress_has_rate_and_time_left(shared: Connection, tmp_path: Path, said_often: None) -> None:
    said: list[str] = []
    upload(shared, noise(tmp_path / "big", 8 * MB), f"{tmp_path}/copied", said.append)
    assert re.fullmatch(r"copying to lab: \d+ % \(\d of 8 MB\), \d+\.\d MB/s, \d+ s left", said[0])
    assert said[-1].startswith("copying to lab: 100 % (8 of 8 MB)") and said[-1].endswith(" 0 s left")


def test_short_copies_say_nothing(shared: Connection, tmp_path: Path) -> None:
    said: list[str] = []
    upload(shared, noise(tmp_path / "small", 1000), f"{tmp_path}/copied", said.append)
    assert said == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 10 MB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "small", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_sent(
    shared: Connection, tmp_path: Path, small_disk: Path
) -> None:
    before = shared.bytes_copied
    with pytest.raises(TargetError, match=r"lab: 20 MB are to be sent to .*small disk, where 10 MB are free"):
        upload(shared, noise(tmp_path / "big", 20 * MB), f"{small_disk}/big", None)
    assert shared.bytes_copied == before and list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_named(
    shared: Connection, tmp_path: Path, small_disk: Path, said_often: None
) -> None:
    def fill(_: str) -> None:
        if not (small_disk / "other").exists():
            noise(small_disk / "other", 8 * MB)

    with pytest.raises(TargetError, match=r"lab: the disk of .*small disk is full: \d MB are free"):
        upload(shared, noise(tmp_path / "big", 6 * MB), f"{small_disk}/big", fill)
    assert not (small_disk / "big").exists()
    # With room it goes on.
    (small_disk / "other").unlink()
    upload(shared, tmp_path / "big", f"{small_disk}/big", None)
    assert (small_disk / "big").read_bytes() == (tmp_path / "big").read_bytes()


def test_a_folder_that_cannot_be_made_is_said(shared: Connection, tmp_path: Path) -> None:
    file = noise(tmp_path / "file", 10)
    with pytest.raises(TargetError, match="a folder cannot be made"):
        upload(shared, file, f"{file}/below/it", None)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/x").touch()
    with pytest.raises(TargetError, match="cannot be written"):
        upload(shared, file, f"{tmp_path}/taken", None)
