"""Copies to and from a host: only what differs, by its digest, and from where a lost link left off."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path, PurePosixPath

from ddtree_bench.targets.launcher import TargetError
from ddtree_bench.targets.ssh.command import read_blocks
from ddtree_bench.targets.ssh.command_line import render
from ddtree_bench.targets.ssh.connection import Connection
from ddtree_bench.targets.ssh.files_there import (
    FileThere,
    digests_there,
    files_there,
    free_bytes,
    make_folders,
    stat_there,
)
from ddtree_bench.targets.ssh.link import Link
from ddtree_bench.targets.ssh.progress import MB, Progress

PART = ".part"
"""Added to the name of a file that is not yet complete."""

BLOCK_BYTES = 1 << 20
EXECUTABLE = 0o755

Report = Callable[[str], None]


@dataclass
class _Item:
    """A file to be copied: its path here, and there, on the host."""

    here: Path
    there: str
    size: int
    executable: bool
    digests: dict[int, str] = field(default_factory=dict)

    @property
    def part(self) -> str:
        """The temporary name on the host: nobody who sends something else to the same place writes to it."""
        return f"{self.there}.{self.digest(self.size)[:12]}{PART}"

    @property
    def folder(self) -> str:
        """The folder of the host that it lies in."""
        return str(PurePosixPath(self.there).parent)

    def digest(self, size: int) -> str:
        """The sha256 of the first bytes of the file here, read once, however often the link is lost."""
        if size not in self.digests:
            self.digests[size] = _digest(self.here, size)
        return self.digests[size]


def upload(connection: Connection, source: Path, destination: str, report: Report | None) -> None:
    """Copy a file or folder of this machine to an absolute path of the host, over SFTP; symbolic links are followed.

    A file whose size and digest agree is not sent again. Each is sent under a temporary name, from where an earlier
    attempt left off if the digest of what it left agrees, and takes its place once the digest of all of it agrees.
    After a lost link the copy goes on. Executable files become executable.

    Raises TargetError for a full disk, with the space that is left, for what cannot be read or written, and for a name
    that is not UTF-8; LinkLost when the link does not come back.
    """
    items = _items(source, destination)
    if items:
        connection.repeated(lambda _: _Upload(connection, items, report).go())
    else:
        make_folders(connection, [destination])


def download(connection: Connection, source: str, destination: Path, report: Report | None) -> None:
    """Copy a file or folder of the host to this machine; symbolic links are followed.

    As `upload`, the other way round. Raises TargetError when there is nothing at `source`, when it changes meanwhile,
    or when something cannot be read or written; LinkLost when the link does not come back.
    """
    found = files_there(connection, source)
    if found is None:
        raise TargetError(f"{connection.destination.name}: {source} is not there")
    items = [
        _Item(destination / name if name else destination, f"{source}/{name}" if name else source, *astuple(file))
        for name, file in sorted(found.items())
    ]
    digests = digests_there(connection, {item.there: item.size for item in items})
    missing = [item for item in items if not _is_here(item, digests[item.there])]
    if "" not in found:
        destination.mkdir(parents=True, exist_ok=True)
    connection.repeated(lambda link: _fetch_all(connection, link, missing, digests, report))


class _Upload:
    """One attempt to send files."""

    def __init__(self, connection: Connection, items: list[_Item], report: Report | None) -> None:
        self._connection = connection
        self._items = items
        self._report = report
        self._name = connection.destination.name

    def go(self) -> None:
        """Send what is missing on the host, or differs."""
        make_folders(self._connection, dict.fromkeys(item.folder for item in self._items))
        found = stat_there(self._connection, (path for item in self._items for path in (item.there, item.part)))
        digests = digests_there(self._connection, self._comparable(found))
        missing = [item for item in self._items if digests.get(item.there) != item.digest(item.size)]
        offsets = {item.there: _agreed(item, found.get(item.part), digests.get(item.part)) for item in missing}
        rest = sum(item.size - offsets[item.there] for item in missing)
        self._require_space(missing, rest)
        began = self._connection.bytes_copied
        try:
            self._make_executable([item for item in self._items if item.there not in offsets], found)
            self._send(missing, offsets, rest)
            self._put_in_place(missing)
        except OSError as error:
            raise self._why(missing, rest - (self._connection.bytes_copied - began), error) from None

    def _comparable(self, found: dict[str, FileThere]) -> dict[str, int]:
        """Sizes of the files on the host that may be what is to be there, or its beginning."""
        whole = {i.there: i.size for i in self._items if i.there in found and found[i.there].size == i.size}
        parts = {i.part: found[i.part].size for i in self._items if i.part in found and found[i.part].size <= i.size}
        return {**whole, **parts}

    def _require_space(self, missing: list[_Item], rest: int) -> None:
        if rest == 0:
            return
        free = free_bytes(self._connection, missing[0].folder)
        if free < rest:
            raise TargetError(
                f"{self._name}: {rest / MB:.0f} MB are to be sent to {missing[0].folder}, where {free / MB:.0f} MB are "
                "free; free some there, or give the target a root on a larger disk"
            )

    def _make_executable(self, items: list[_Item], found: dict[str, FileThere]) -> None:
        wrong = [item for item in items if item.executable and not found[item.there].executable]
        if wrong:
            with self._connection.sftp() as sftp:
                for item in wrong:
                    sftp.chmod(item.there, EXECUTABLE)

    def _send(self, missing: list[_Item], offsets: dict[str, int], rest: int) -> None:
        progress = Progress(f"copying to {self._name}", self._report)
        progress.expect(rest)
        with self._connection.sftp() as sftp:
            for item in missing:
                offset = offsets[item.there]
                with item.here.open("rb") as here, sftp.open(item.part, "r+b" if offset else "wb") as there:
                    here.seek(offset)
                    there.seek(offset)
                    there.set_pipelined(True)
                    while block := here.read(BLOCK_BYTES):
                        there.write(block)
                        self._connection.count_copied(len(block))
                        progress.add(len(block))

    def _put_in_place(self, missing: list[_Item]) -> None:
        if not missing:
            return
        # Errors of writes that were not waited for show here.
        digests = digests_there(self._connection, {item.part: item.size for item in missing})
        with self._connection.sftp() as sftp:
            for item in missing:
                if digests[item.part] != item.digest(item.size):
                    raise OSError(f"what arrived in {item.part} differs from {item.here}")
                if item.executable:
                    sftp.chmod(item.part, EXECUTABLE)
                sftp.posix_rename(item.part, item.there)

    def _why(self, missing: list[_Item], rest: int, error: OSError) -> TargetError:
        """What SFTP calls a failure, in words."""
        folder = (missing or self._items)[0].folder
        free = free_bytes(self._connection, folder)
        if free <= max(rest, BLOCK_BYTES):
            return TargetError(
                f"{self._name}: the disk of {folder} is full: {free / MB:.0f} MB are free; free some there, or give "
                "the target a root on a larger disk"
            )
        return TargetError(f"{self._name}: {folder} cannot be written as {self._connection.destination.user}: {error}")


def _items(source: Path, destination: str) -> list[_Item]:
    destination = destination.rstrip("/") or "/"
    if not source.exists():
        raise TargetError(f"{source} is not there, so it cannot be copied")
    if source.is_file():
        return [_item(source, destination)]
    return [
        _item(path, f"{destination}/{path.relative_to(source).as_posix()}")
        for folder, _, names in os.walk(source, followlinks=True)
        for path in sorted(Path(folder) / name for name in names)
    ]


def _item(here: Path, there: str) -> _Item:
    try:
        there.encode()
    except UnicodeEncodeError:
        raise TargetError(
            f"{str(here)!r}: the name is not UTF-8, so the file cannot be copied; give it another name"
        ) from None
    status = here.stat()
    return _Item(here, there, status.st_size, bool(status.st_mode & 0o100))


def _agreed(item: _Item, part: FileThere | None, digest: str | None) -> int:
    """How many bytes of a file are on the host already, from an earlier attempt."""
    return part.size if part is not None and digest is not None and digest == item.digest(part.size) else 0


def _is_here(item: _Item, digest: str) -> bool:
    return item.here.is_file() and item.here.stat().st_size == item.size and item.digest(item.size) == digest


def _fetch_all(
    connection: Connection, link: Link, missing: list[_Item], digests: dict[str, str], report: Report | None
) -> None:
    """One attempt to fetch files; those that an earlier one has completed are passed over."""
    left = [item for item in missing if not item.here.exists() or _digest(item.here) != digests[item.there]]
    progress = Progress(f"copying from {connection.destination.name}", report)
    progress.expect(sum(item.size - _begun(item) for item in left))
    for item in left:
        try:
            _fetch(connection, link, item, digests[item.there], progress)
        except OSError as error:
            raise TargetError(f"{item.here} cannot be written: {error}") from None


def _fetch(connection: Connection, link: Link, item: _Item, digest: str, progress: Progress) -> None:
    part = _part_here(item)
    part.parent.mkdir(parents=True, exist_ok=True)
    offset = _begun(item)
    for _ in range(2):
        # Not over SFTP: there each block is asked for, which needs a thread that asks ahead, and paramiko's prints a
        # traceback when the link is lost.
        command = render(["tail", "-c", f"+{offset + 1}", "--", item.there], {})
        with part.open("r+b" if offset else "wb") as here:
            here.seek(offset)
            for block in read_blocks(link, command):
                here.write(block)
                connection.count_copied(len(block))
                progress.add(len(block))
        if _digest(part) == digest:
            if item.executable:
                part.chmod(EXECUTABLE)
            part.replace(item.here)
            return
        # What an earlier attempt left is wrong, or the file changes.
        offset = 0
        progress.expect(item.size)
    raise TargetError(
        f"{connection.destination.name}: {item.there} changes while it is copied; copy it when it is done"
    )


def _part_here(item: _Item) -> Path:
    return item.here.with_name(f"{item.here.name}{PART}")


def _begun(item: _Item) -> int:
    """How many bytes of a file an earlier attempt to fetch it has left here."""
    part = _part_here(item)
    size = part.stat().st_size if part.exists() else 0
    return size if size <= item.size else 0


def _digest(path: Path, size: int | None = None) -> str:
    """The sha256 of a file here, or of its first bytes."""
    digest, left = hashlib.sha256(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(BLOCK_BYTES, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
