"""A Python on a host for the wheels of an environment, or for the package's own programs; sent where there is none."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_bench.targets.launcher import CommandResult, TargetError
from ddtree_bench.targets.python_archive import pack
from ddtree_bench.targets.ssh.connection import Connection
from ddtree_bench.targets.ssh.transfer import upload

ANY = "py3"
"""The tag of what runs on any Python that this package runs on."""

OLDEST = (3, 11)
NEWEST = (3, 14)

STANDARD_LIBRARY = ("ctypes", "http.client", "ssl", "zlib")
"""Modules by which a whole standard library is told from one of which a distribution has left parts out."""

FOR_ENVIRONMENTS = (*STANDARD_LIBRARY, "venv", "ensurepip")

LOOK_TIMEOUT_S = 60.0
UNPACK_TIMEOUT_S = 300.0

TEST = f"""\
import importlib, sys
tag, modules = sys.argv[1], sys.argv[2:]
own = "cp%d%d%s" % (sys.version_info[:2] + (sys.abiflags,))
if not (tag == own or tag == "{ANY}" and sys.version_info >= {OLDEST}):
    sys.exit("it is " + own)
for module in modules:
    importlib.import_module(module)
print(sys.executable)
"""
"""Prints the interpreter's own path if it fits the tag and has the modules; fails with words if not."""

LOOK = """\
root=$1 names=$2 test=$3
shift 3
echo "$(uname -s -m)"
for python in $names "$root"/pythons/*/bin/python3; do
    if found=$("$python" -c "$test" "$@" 2>/dev/null); then
        printf '%s\\n' "$found"
        exit
    fi
done
"""

UNPACK = """\
set -e
archive=$1 folder=$2 test=$3
shift 3
if [ ! -d "$folder" ]; then
    made=$folder.partial.$$
    trap 'rm -rf -- "$made"' EXIT
    mkdir -p -- "$made"
    tar -xzf "$archive" -C "$made"
    "$made/bin/python3" -c "$test" "$@" >/dev/null
    mv -T -- "$made" "$folder" || [ -d "$folder" ]
fi
rm -f -- "$archive"
"""
"""A Python takes its place when it is whole and has run there, so whatever lies in the place can be used."""


@dataclass(frozen=True)
class _Looked:
    """What was found on a host: its platform, as Linux x86_64, and an interpreter that fits."""

    platform: str
    python: str | None


def fitting_python(connection: Connection, root: str, tag: str, cache: Path, report: Callable[[str], None]) -> str:
    """Return the path of an interpreter on the host for a tag: cp311 for an environment's wheels, py3 for programs.

    One on the login's path is taken, then one that was put below `root`. Where there is none, the Python that runs here
    is packed in the folder `cache`, sent, and put below `root`. Raises TargetError, with the remedy, where that Python
    does not fit or does not run.
    """
    found = found_python(connection, root, tag)
    if found is not None:
        return found
    modules, lack = _modules(tag), _lack(connection, tag)
    report(f"{lack}: sending that of this machine, {platform.python_version()}")
    archive = pack(cache)
    folder = f"{root}/pythons/{archive.name.removeprefix('python-').removesuffix('.tar.gz')}"
    sent = f"{root}/pythons/{archive.name}"
    upload(connection, archive, sent, report)
    unpacked = connection.run(["sh", "-c", UNPACK, "sh", sent, folder, TEST, tag, *modules], timeout_s=UNPACK_TIMEOUT_S)
    if unpacked.exit_code != 0:
        raise TargetError(f"{lack}, and that of this machine does not run there: {_why(unpacked)}; {_remedy(tag)}")
    return f"{folder}/bin/python3"


def found_python(connection: Connection, root: str, tag: str) -> str | None:
    """Return the path of an interpreter on the host for a tag; None where that of this machine can be sent.

    Raises TargetError, with the remedy, where it does not fit.
    """
    looked = _look(connection, root, tag, _modules(tag))
    here, own = f"{platform.system()} {platform.machine()}", f"cp{sys.version_info.major}{sys.version_info.minor}"
    if looked.python is None and (tag not in (ANY, own) or looked.platform != here):
        raise TargetError(
            f"{_lack(connection, tag)}, and that of this machine, {own} for {here}, is of no use there; {_remedy(tag)}"
        )
    return looked.python


def _modules(tag: str) -> Sequence[str]:
    return STANDARD_LIBRARY if tag == ANY else FOR_ENVIRONMENTS


def _lack(connection: Connection, tag: str) -> str:
    return f"{connection.destination.name}: has no {_described(tag, _modules(tag))}"


def _look(connection: Connection, root: str, tag: str, modules: Sequence[str]) -> _Looked:
    argv = ["sh", "-c", LOOK, "sh", root, " ".join(_names(tag)), TEST, tag, *modules]
    result = connection.run(argv, timeout_s=LOOK_TIMEOUT_S)
    lines = result.stdout.splitlines()
    if not lines:
        raise TargetError(f"{connection.destination.name}: cannot look for a Python there: {_why(result)}")
    return _Looked(lines[0], lines[1] if len(lines) > 1 else None)


def _names(tag: str) -> list[str]:
    """What interpreters that may fit a tag are called."""
    if tag != ANY:
        return [f"python{tag[2]}.{tag[3:]}", "python3"]
    return ["python3", *(f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1))]


def _described(tag: str, modules: Sequence[str]) -> str:
    version = f"{OLDEST[0]}.{OLDEST[1]} or newer" if tag == ANY else f"{tag[2]}.{tag[3:]}"
    return f"Python {version} with {', '.join(modules)}"


def _remedy(tag: str) -> str:
    name = "python3" if tag == ANY else f"python{tag[2]}.{tag[3:]}"
    return f"install {name} there with its whole standard library (Debian and Ubuntu: {name} and {name}-venv)"


def _why(result: CommandResult) -> str:
    return " ".join(result.stderr.split())[-300:] or f"exit status {result.exit_code}"
