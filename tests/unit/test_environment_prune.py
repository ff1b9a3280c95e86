"""Old environments go by rule; what is wanted, used or somebody else's stays."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from configurations import tree, write_project

from ddtree_bench.deployment import prune_target
from ddtree_bench.environments.prune import prune_environments
from ddtree_bench.project import open_project
from ddtree_bench.spool import Spool
from ddtree_bench.targets.lease import Owner
from ddtree_bench.targets.local import LocalLauncher

OLD_S = 2 * 86400


def environment(root: Path, key: str, used: float = 0, home: Path = Path("/usr/bin"), name: str = "reference") -> Path:
    """A folder such as a deployment leaves, used so many seconds ago."""
    folder = root / f"{name}-{key * 12}-cp311"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/usr/bin/env")
    (folder / "pyvenv.cfg").write_text(f"home = {home}\nversion = 3.11.7\n")
    (folder / "content").write_bytes(b"x" * 10000)
    (folder / "receipt.json").write_text("{}")
    folder.with_name(f"{folder.name}.lock").touch()
    os.utime(folder / "receipt.json", (0, time.time() - used))
    return folder


def leftover(path: Path, age_s: float = OLD_S) -> Path:
    """A folder with a file of some age in it."""
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x" * 5000)
    for written in (path / "file", path):
        os.utime(written, (0, time.time() - age_s))
    return path


def file(path: Path, age_s: float = OLD_S) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    os.utime(path, (0, time.time() - age_s))
    return path


def prune(tmp_path: Path, root: Path, keep: list[str], recent: int, said: list[str] | None = None) -> list[Path]:
    launcher = LocalLauncher(tmp_path / "leases", "test")
    found = prune_environments(launcher, str(root), keep, recent, (said if said is not None else []).append)
    assert not [entry for entry in found if Path(entry.path).exists()]
    return [Path(entry.path) for entry in found]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_the_wanted_and_the_last_used_are_kept(tmp_path: Path, root: Path) -> None:
    wanted, newest, newer, old = (environment(root, key, used) for key, used in zip("abcd", (9, 1, 2, 3), strict=True))
    assert prune(tmp_path, root, [wanted.name], 2) == [old]
    assert prune(tmp_path, root, [wanted.name], 0) == [newest, newer]
    assert {path.name for path in root.iterdir()} == {wanted.name, f"{wanted.name}.lock"}


def test_what_was_removed_is_told_with_what_it_took(tmp_path: Path, root: Path) -> None:
    folder = environment(root, "a")
    (removed,) = prune_environments(LocalLauncher(tmp_path / "leases", "test"), str(root), [], 0, print)
    assert removed.path == str(folder) and 10000 <= removed.n_bytes < 100000
    assert str(removed) == f"{folder} (0.00 GiB)"


def test_what_is_not_ours_is_left_alone(tmp_path: Path, root: Path) -> None:
    theirs = [leftover(root / name) for name in ("data", "reference-abc-cp311", "x.wheels", "pythons/mine", "tools/x")]
    theirs += [file(root / name) for name in ("notes.lock", "pythons/python.tar.gz", "tools/other.zip")]
    elsewhere = leftover(tmp_path / "elsewhere")
    (root / f"reference-{'a' * 12}-cp311").symlink_to(elsewhere)
    assert prune(tmp_path, root, [], 0) == []
    assert all(path.exists() for path in theirs) and (elsewhere / "file").exists()


@pytest.mark.parametrize("how", ["argument", "folder", "variable"])
def test_what_a_process_runs_from_is_kept(tmp_path: Path, root: Path, how: str) -> None:
    folder, said = environment(root, "a"), list[str]()
    other = environment(root, "a", name="reference-x")
    argv = ["sleep", "60"] if how != "argument" else ["sh", "-c", "sleep 60; :", str(folder / "bin" / "python")]
    cwd, env = folder if how == "folder" else None, {**os.environ, "VIRTUAL_ENV": str(folder)}
    with subprocess.Popen(argv, cwd=cwd, env=env if how == "variable" else None) as process:
        try:
            assert prune(tmp_path, root, [], 0, said) == [other]
        finally:
            process.kill()
    assert folder.exists() and said == [f"{folder}: kept, for process {process.pid} runs from it"]
    assert prune(tmp_path, root, [], 0) == [folder]


def test_what_broken_installations_left_goes_unless_one_is_going_on(tmp_path: Path, root: Path) -> None:
    folder, said = environment(root, "a"), list[str]()
    left = [leftover(folder.with_name(f"{folder.name}.{kind}"), 0) for kind in ("partial", "replaced")]
    half = folder.with_name(f"reference-{'b' * 12}-cp311.partial")
    leftover(half, 0)
    with locked(half.with_name(f"reference-{'b' * 12}-cp311.lock")):
        assert prune(tmp_path, root, [folder.name], 0, said) == left
    assert said and all("an installation is going on" in line for line in said)
    assert prune(tmp_path, root, [folder.name], 0) == [half]
    assert {path.name for path in root.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_sent_wheels_stay_while_they_are_wanted_or_may_be_on_their_way(tmp_path: Path, root: Path) -> None:
    installed = environment(root, "a")
    used = leftover(installed.with_name(f"{installed.name}.wheels"))
    wanted = leftover(root / f"reference-{'b' * 12}-cp311.wheels")
    arriving = leftover(root / f"reference-{'c' * 12}-cp311.wheels", age_s=60)
    abandoned = leftover(root / f"reference-{'d' * 12}-cp311.wheels")
    keep = [installed.name, f"reference-{'b' * 12}-cp311"]
    assert prune(tmp_path, root, keep, 0) == [used, abandoned]
    assert wanted.exists() and arriving.exists()


def test_an_interpreter_stays_as_long_as_an_environment_needs_it(tmp_path: Path, root: Path) -> None:
    pythons = root / "pythons"
    needed, idle = leftover(pythons / f"cp311-{'a' * 12}"), leftover(pythons / f"cp311-{'b' * 12}")
    half = leftover(pythons / f"cp311-{'c' * 12}.partial.77")
    archives = [file(pythons / f"python-cp311-{name}") for name in ("c" * 12 + ".tar.gz", "d" * 12 + ".tar.gz.part")]
    arriving = file(pythons / f"python-cp311-{'e' * 12}.tar.gz.part", 60)
    folder = environment(root, "a", home=needed / "bin")
    assert sorted(prune(tmp_path, root, [folder.name], 0)) == sorted([idle, half, *archives])
    assert needed.exists() and arriving.exists()
    assert prune(tmp_path, root, [], 0) == [folder, needed]


def test_the_newest_of_our_own_programs_stays(tmp_path: Path, root: Path) -> None:
    old, older, newest = (
        file(root / "tools" / f"ddtree_bench-{key * 12}.zip", age) for key, age in zip("abc", (20, 30, 10), strict=True)
    )
    assert prune(tmp_path, root, [], 0) == [older, old] and newest.exists()


def test_cells_that_nobody_has_fetched_go_after_seven_days(tmp_path: Path, root: Path) -> None:
    ours = Spool(LocalLauncher(tmp_path / "leases", "test"), str(root), Owner.this_process("run"))
    entries = [ours.entry({"plan_key": key * 64, "host_key": "f" * 64}) for key in "abc"]
    spool, old_s, young_s = root / "spool", 7.1 * 86400, 6.9 * 86400
    forgotten, damaged = (leftover(path / entries[0], old_s) for path in (spool, spool / "damaged"))
    waiting = [leftover(path / entries[1], young_s) for path in (spool, spool / "damaged")]
    written = leftover(spool / entries[2], old_s)
    file(written / "done.json", 60)
    theirs = leftover(spool / "notes", old_s)
    assert prune(tmp_path, root, [], 0) == [forgotten, damaged]
    assert all(path.exists() for path in (*waiting, written, theirs))


def test_what_clones_on_this_machine_may_share_is_left_alone(tmp_path: Path, root: Path) -> None:
    config = tree()
    config["targets"]["local"]["root"] = str(root)
    (tmp_path / "envs").symlink_to(Path(__file__).parents[2] / "envs")
    # One more than a host would keep.
    of_another_clone = [environment(root, name, OLD_S) for name in "abc"]
    assert prune_target(open_project(config, write_project(tmp_path), tmp_path / "results"), "local", print) == []
    assert all(folder.exists() for folder in of_another_clone)


def test_where_nothing_was_deployed_nothing_is_removed(tmp_path: Path, root: Path) -> None:
    assert prune(tmp_path, root, [], 0) == [] and not root.exists()
