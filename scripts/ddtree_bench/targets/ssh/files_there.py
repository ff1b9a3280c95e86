"""What a host tells of its files: which there are, their digests, the space that is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh.connection import Connection

COMMAND_S = 60.0
HASHED_BYTES_A_SECOND = 20e6
"""Less than the slowest disk gives."""

NOT_THERE = 3
NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes of a command's output that are not UTF-8."""

STAT = ["xargs", "-0", "stat", "-L", "--printf=%s %f %n\\0", "--"]
LIST = f"""\
[ -e "$0" ] || exit {NOT_THERE}
exec find -L "$0" -type f -printf '%s %m %P\\0'
"""


@dataclass(frozen=True)
class FileThere:
    """A file on the host."""

    size: int
    executable: bool


def stat_there(connection: Connection, paths: Iterable[str]) -> dict[str, FileThere]:
    """Return those of some absolute paths of the host at which there is something."""
    result = connection.run(STAT, stdin=_listed(paths), timeout_s=COMMAND_S)
    found = {}
    for entry in result.stdout.split("\0")[:-1]:
        size, mode, path = entry.split(" ", 2)
        found[path] = FileThere(int(size), bool(int(mode, 16) & 0o100))
    return found


def files_there(connection: Connection, path: str) -> dict[str, FileThere] | None:
    """Return the files of a folder of the host by their path in it, a file itself as ""; None when nothing is there."""
    result = connection.run(["sh", "-c", LIST, path], timeout_s=COMMAND_S)
    if result.exit_code == NOT_THERE:
        return None
    _require(connection, result.exit_code, f"{path} cannot be read: {result.stderr}")
    found = {}
    for entry in result.stdout.split("\0")[:-1]:
        size, mode, name = entry.split(" ", 2)
        if NOT_UTF8 in name:
            raise TargetError(
                f"{connection.destination.name}: {path}/{name}: the name is not UTF-8, so the file cannot be copied; "
                "give it another name there"
            )
        found[name] = FileThere(int(size), bool(int(mode, 8) & 0o100))
    return found


def digests_there(connection: Connection, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the sha256 of files of the host, whose sizes are given by path, by one command."""
    if not sizes:
        return {}
    result = connection.run(
        ["xargs", "-0", "sha256sum", "-bz", "--"],
        stdin=_listed(sizes),
        timeout_s=COMMAND_S + sum(sizes.values()) / HASHED_BYTES_A_SECOND,
    )
    _require(connection, result.exit_code, f"a file cannot be read: {result.stderr}")
    # A digest, a space, a star, the path.
    return {entry[66:]: entry[:64] for entry in result.stdout.split("\0")[:-1]}


def make_folders(connection: Connection, folders: Iterable[str]) -> None:
    """Make folders of the host, and those above them."""
    result = connection.run(["xargs", "-0", "mkdir", "-p", "--"], stdin=_listed(folders), timeout_s=COMMAND_S)
    _require(connection, result.exit_code, f"a folder cannot be made: {result.stderr}")


def free_bytes(connection: Connection, folder: str) -> int:
    """Return how many bytes this user may still write below a folder of the host."""
    result = connection.run(["df", "-B1", "--output=avail", "--", folder], timeout_s=COMMAND_S)
    _require(connection, result.exit_code, f"the space of {folder} is not known: {result.stderr}")
    return int(result.stdout.split()[-1])


def _listed(paths: Iterable[str]) -> str:
    return "".join(f"{path}\0" for path in paths)


def _require(connection: Connection, exit_code: int, what: str) -> None:
    if exit_code != 0:
        raise TargetError(f"{connection.destination.name}: {what.strip()}")
