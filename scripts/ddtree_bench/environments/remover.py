"""Remove old environments on the machine that this program runs on: standard library only, sent to any target.

    python - '{"root": ..., "keep": [NAME...], "keep_recent": N}' < remover.py

Prints lines on what is kept though nothing asks for it, and last a JSON list of what was removed, with its bytes.
Touched is only what has a receipt of ours or a name of ours, directly below the root or below its folders `pythons`,
`tools` and `spool`. An environment that a process runs from stays, and so does what an installation is working on.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ENVIRONMENT = r"[a-z0-9]+(-[a-z0-9]+)*-[0-9a-f]{12}-(py3|cp3\d+)(-[0-9a-f]{6})?"
ENVIRONMENT_NAME = re.compile(ENVIRONMENT)
LEFTOVER_NAME = re.compile(rf"(?P<environment>{ENVIRONMENT})\.(?P<kind>partial|replaced|wheels|lock)")
PYTHON_NAME = re.compile(r"cp3\d+-[0-9a-f]{12}")
PYTHON_LEFTOVER_NAME = re.compile(r"cp3\d+-[0-9a-f]{12}\.partial\.\d+|python-cp3\d+-[0-9a-f]{12}\.tar\.gz(\.part)?")
TOOLS_NAME = re.compile(r"ddtree_bench-[0-9a-f]{12}\.zip(\.part)?")
SPOOL_NAME = re.compile(r"[0-9a-f]{12}(-[0-9a-f]{12}){2}")

LEFT_ALONE_S = 86400.0
"""Who sends files holds no lock: what was written within a day may still be on its way."""

NOT_FETCHED_S = 7 * 86400.0
"""A measured cell waits here for the next run of its workflow that plans it; nobody has come for an older one."""


class Remover:
    """What is removed below one root, and why what could be removed is not."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.removed: list[dict[str, Any]] = []

    def environments(self, keep: set[str], keep_recent: int) -> None:
        """Remove the environments that are not among `keep`, nor the `keep_recent` used last of the others."""
        others = sorted(self._environments(keep), key=used_last, reverse=True)
        for folder in others[keep_recent:]:
            pid = user(folder)
            if pid is not None:
                say(f"{folder}: kept, for process {pid} runs from it")
                continue
            with unless_installing(folder) as free:
                if free:
                    self.remove(folder)

    def leftovers(self, keep: set[str]) -> None:
        """Remove what installations have left that were broken off, and the locks of folders that are not there."""
        for path in sorted(self._root.iterdir()):
            name = LEFTOVER_NAME.fullmatch(path.name)
            if name is None or (name["kind"] == "wheels" and self._wanted(path, name["environment"], keep)):
                continue
            folder = self._root / name["environment"]
            with unless_installing(folder) as free:
                if free and name["kind"] != "lock":
                    self.remove(path)

    def pythons(self) -> None:
        """Remove interpreters that were sent here, unless an environment is made from one, or it runs."""
        made_from = [home(folder) for folder in self._environments(set())]
        for path in _listed(self._root / "pythons"):
            if PYTHON_NAME.fullmatch(path.name):
                if os.path.realpath(path / "bin") not in made_from and user(path) is None:
                    self.remove(path)
            elif PYTHON_LEFTOVER_NAME.fullmatch(path.name) and is_old(path):
                self.remove(path)

    def tools(self) -> None:
        """Remove the archives of this workflow's own programs, but for the newest and for those that run."""
        archives = [path for path in _listed(self._root / "tools") if TOOLS_NAME.fullmatch(path.name)]
        for path in sorted(archives, key=lambda path: path.stat().st_mtime)[:-1]:
            if user(path) is None:
                self.remove(path)

    def spool(self) -> None:
        """Remove measured cells that nobody has fetched for long, damaged ones among them."""
        for path in [*_listed(self._root / "spool"), *_listed(self._root / "spool" / "damaged")]:
            if SPOOL_NAME.fullmatch(path.name) and is_old(path, NOT_FETCHED_S) and user(path) is None:
                self.remove(path)

    def remove(self, path: Path) -> None:
        """Remove a file or folder, and note what was gained."""
        size = disk_bytes(path)
        try:
            if path.is_dir() and not path.is_symlink():
                # First what says that it is an environment: half of one is none.
                (path / "receipt.json").unlink(missing_ok=True)
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            say(f"{path}: cannot be removed: {error.strerror}: {error.filename}")
            return
        self.removed.append({"path": str(path), "bytes": size})

    def _environments(self, but: set[str]) -> list[Path]:
        named = (path for path in _listed(self._root) if ENVIRONMENT_NAME.fullmatch(path.name))
        return [path for path in named if path.name not in but and path.is_dir() and not path.is_symlink()]

    def _wanted(self, wheels: Path, environment: str, keep: set[str]) -> bool:
        """Whether wheels that were sent will be used: they are to be installed, or may still be on their way."""
        installed = (self._root / environment / "receipt.json").exists()
        return (environment in keep and not installed) or not is_old(wheels)


def user(path: Path) -> int | None:
    """The process that runs from a file or folder; None when there is none that this user can see."""
    names = "|".join(re.escape(name) for name in {str(path), os.path.realpath(path)})
    mention = re.compile(rf"({names})(?![\w.-])")
    for process in Path("/proc").glob("[0-9]*"):
        if mention.search(what_it_runs_from(process)):
            return int(process.name)
    return None


def what_it_runs_from(process: Path) -> str:
    """A process's program and folder, and unless it is this one its arguments, variables and mapped files."""
    parts = []
    for link in ("exe", "cwd"):
        with suppress(OSError):
            parts.append(str((process / link).readlink()))
    for file in ("cmdline", "environ", "maps") if int(process.name) != os.getpid() else ():
        with suppress(OSError):
            parts.append((process / file).read_bytes().decode(errors="replace"))
    return "\n".join(parts)


@contextmanager
def unless_installing(folder: Path) -> Iterator[bool]:
    """Hold the lock of an environment's folder, which is removed when the folder is; False when it is held."""
    path = folder.with_name(f"{folder.name}.lock")
    with ExitStack() as opened:
        try:
            fcntl.flock(opened.enter_context(path.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: left alone, for an installation is going on")
            yield False
        except PermissionError:
            say(f"{folder}: left alone, for it is another user's")
            yield False
        else:
            yield True
            if not folder.exists():
                path.unlink(missing_ok=True)


def used_last(folder: Path) -> float:
    """When an environment was used last: its receipt is touched whenever it is seen to be in order."""
    try:
        return (folder / "receipt.json").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def home(folder: Path) -> str | None:
    """The folder of the interpreter that an environment was made from, links resolved."""
    with suppress(OSError):
        for line in (folder / "pyvenv.cfg").read_text().splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "home":
                return os.path.realpath(value.strip())
    return None


def is_old(path: Path, than_s: float = LEFT_ALONE_S) -> bool:
    """Whether nothing of a file or folder was written for so many seconds, by default a day."""
    times = [file.lstat().st_mtime for file in (path, *path.glob("*"))]
    return time.time() - max(times) > than_s


def disk_bytes(path: Path) -> int:
    """What a file or folder takes of the disk."""
    return sum(file.lstat().st_blocks * 512 for file in (path, *path.rglob("*")))


def say(text: str) -> None:
    """Print a line for people."""
    print(text, flush=True)


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def main() -> None:
    """Read the request from the command line, remove, and print what was removed."""
    request = json.loads(sys.argv[1])
    remover, keep = Remover(Path(request["root"])), set(request["keep"])
    remover.environments(keep, request["keep_recent"])
    remover.leftovers(keep)
    remover.pythons()
    remover.tools()
    remover.spool()
    print(json.dumps(remover.removed))


if __name__ == "__main__":
    main()
