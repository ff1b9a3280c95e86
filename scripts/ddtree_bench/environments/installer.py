"""Install a wheelhouse on the machine that this program runs on: standard library only, sent to any target.

    python - '{"action": "install", "folder": ..., ...}' < installer.py

Action `verify` prints the receipt of the folder when it is the environment asked for, and null when it is not; with
`wait` it first waits for an installation that is going on. Action `install` waits too, makes the folder the environment
asked for, and prints the receipt. A receipt is written last: a folder without one is half made, and is made anew. An
environment is made beside its folder and takes its place when it is complete, so what runs from the old one keeps it
until then. It is made to the end though whoever asked for it be gone. Where an installation of SGLang is adopted, this
program runs under its interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SOURCE_SUFFIXES = frozenset({".py", ".cu", ".cuh", ".h", ".cpp", ".json"})
"""The files of SGLang that say what it does: its modules, the kernels that it compiles when it runs, tuned settings."""

ADOPTED_TOOLS = "adopted-tools"
"""A link in an environment's folder to the programs of the adopted installation, which its servers find."""

WAIT_S = 1800.0
"""How long another installation of the same folder is waited for."""

SAY_EVERY_S = 10.0

VERSIONS = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"


def verified(request: dict[str, Any]) -> dict[str, Any] | None:
    """The receipt in the folder, if it is that of the wheelhouse asked for and what it lists is still installed."""
    folder = Path(request["folder"])
    try:
        receipt: dict[str, Any] = json.loads((folder / "receipt.json").read_text())
    except (OSError, ValueError):
        return None
    if any(receipt.get(name) != request[name] for name in ("engine", "key", "manifest_sha256", "folder")):
        return None
    if request["adopt"] is not None and adopted_problems(request["adopt"]):
        return None
    versions = installed_versions(folder)
    if versions is None or receipt["versions"] != versions:
        return None
    if request["adopt"] is not None and receipt.get("adopted") != what_was_adopted(request["adopt"], versions):
        return None
    # When it was used last decides what is kept. It may be another user's.
    with suppress(OSError):
        os.utime(folder / "receipt.json")
    return receipt


def installed_versions(folder: Path) -> dict[str, str] | None:
    """Version by distribution in an environment; None when its Python does not run."""
    try:
        output = subprocess.check_output([folder / "bin" / "python", "-c", VERSIONS], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(json.loads(output))


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Make the folder the environment asked for; exits with a message that says what failed."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if request["python"] not in (tag, "py3"):
        sys.exit(f"the wheelhouse is for {request['python']}, but {sys.executable} is {tag}; use that Python here")
    problems = adopted_problems(request["adopt"]) if request["adopt"] else []
    if problems:
        sys.exit("; ".join(problems))
    began = time.monotonic()
    folder = Path(request["folder"])
    made = folder.with_name(f"{folder.name}.partial")
    if made.exists() or folder.exists():
        say(f"{folder}: not the environment that is wanted, or half made: making it anew")
        shutil.rmtree(made, ignore_errors=True)
    if request["adopt"]:
        install_beside(request, made)
    else:
        install_all(request, made)
    check(str(made / "bin" / "python"), request)
    versions = installed_versions(made)
    receipt = {
        **{name: request[name] for name in ("engine", "build", "key", "manifest_sha256", "folder")},
        "python": str(folder / "bin" / "python"),
        "versions": versions,
        "seconds": round(time.monotonic() - began, 1),
    }
    if request["adopt"]:
        receipt["adopted"] = what_was_adopted(request["adopt"], versions or {})
    move_into_place(made, folder)
    # After a power cut no receipt may stand for files that never reached the disk.
    subprocess.run(["sync", "--file-system", str(folder)], check=False)
    partial = folder / "receipt.partial"
    partial.write_text(json.dumps(receipt, indent=1))
    partial.replace(folder / "receipt.json")
    return receipt


def move_into_place(made: Path, folder: Path) -> None:
    """Put an environment that is complete where it belongs; its scripts name the interpreter by its path."""
    for script in (*(made / "bin").iterdir(), made / "pyvenv.cfg"):
        content = b"" if script.is_symlink() else script.read_bytes()
        if str(made).encode() in content and b"\0" not in content:
            script.write_bytes(content.replace(str(made).encode(), str(folder).encode()))
    replaced = folder.with_name(f"{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    made.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def install_all(request: dict[str, Any], folder: Path) -> None:
    """Make a virtual environment with every wheel of the wheelhouse, and nothing from an index."""
    name = Path(request["folder"]).name
    run([sys.executable, "-m", "venv", "--prompt", name, str(folder)], "making the virtual environment")
    requirements = folder / "requirements.txt"
    wheels = Path(request["wheels_folder"])
    requirements.write_text(
        "".join(
            f"{wheel['name']} @ {(wheels / wheel['file']).as_uri()} --hash=sha256:{wheel['sha256']}\n"
            for wheel in request["wheels"]
        )
    )
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-input", "--no-index", "--no-deps"]

    def installed() -> str:
        found = folder.glob("lib/python*/site-packages/*.dist-info")
        return f"{len(list(found))} of {len(request['wheels'])} installed"

    # Modules are compiled when they are first imported, in the checks: a third of the time, for the tenth that is used.
    options = ["--require-hashes", "--no-compile", "--requirement", str(requirements)]
    run([*pip, *options], "installing the wheels", progress=installed)


def install_beside(request: dict[str, Any], folder: Path) -> None:
    """Make a virtual environment that holds our own wheels and sees the packages of the one that is adopted.

    The wheels are pure Python, so unpacking them installs them: the adopted installation may have no pip.
    """
    venv = ["-m", "venv", "--without-pip", "--prompt", Path(request["folder"]).name, str(folder)]
    run([sys.executable, "-B", *venv], "making the virtual environment")
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for wheel in request["wheels"]:
        path = Path(request["wheels_folder"]) / wheel["file"]
        if sha256(path) != wheel["sha256"]:
            sys.exit(f"{path}: is not the wheel of the manifest; build the environment again")
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site_packages)
    seen = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    # Compiled modules go into our folder, since nothing may be written into theirs.
    lines = [f"import sys; sys.pycache_prefix = {str(Path(request['folder']) / 'pycache')!r}"]
    lines += [f"import site; site.addsitedir({entry!r})" for entry in seen]
    (site_packages / "adopted.pth").write_text("\n".join(lines) + "\n")
    (folder / ADOPTED_TOOLS).symlink_to(Path(sys.executable).parent)


def adopted_problems(adopt: Mapping[str, Any]) -> list[str]:
    """Why the SGLang that this interpreter sees cannot be adopted, not the release or not its files; [] when it can."""
    where = f"adopt: {adopt['path']}"
    remedy = f"install sglang=={adopt['release']} there, or take `adopt` out, so that SGLang is deployed"
    folder = sglang_folder()
    if folder is None:
        return [f"{where}: has no SGLang; {remedy}"]
    version = importlib.metadata.version("sglang")
    if version.split("+")[0] != adopt["release"]:
        return [f"{where}: has SGLang {version}, but the DDTree plugin is made for {adopt['release']}; {remedy}"]
    changed = [name for name, digest in adopt["files"].items() if sha256(folder / name) != digest]
    if changed:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        return [f"{where}: {shown} in {folder}: not as in SGLang {adopt['release']}, and the plugin hooks it; {remedy}"]
    return []


def sglang_folder() -> Path | None:
    """The folder that holds the package of SGLang which this interpreter imports; None when there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parents[1]


def what_was_adopted(adopt: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """What the receipt says of an adopted installation; `installation` stands for it in the host's identity."""
    digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()
    return {
        "path": adopt["path"],
        "python": sys.executable,
        "folder": str(sglang_folder()),
        "version": versions.get("sglang"),
        "files_sha256": hashlib.sha256(json.dumps(adopt["files"], sort_keys=True).encode()).hexdigest(),
        "files": len(adopt["files"]),
        "installation": (
            f"SGLang {versions.get('sglang')}, torch {versions.get('torch')}, Python {platform.python_version()}, "
            f"{len(versions)} distributions, versions {digest[:12]}, source {source_digest()[:12]}"
        ),
    }


def source_digest() -> str:
    """The digest of the names and contents of the adopted SGLang's source files, 64 hex digits."""
    folder = sglang_folder()
    files = sorted((folder / "sglang").rglob("*")) if folder is not None else []
    digest = hashlib.sha256()
    for file in files:
        if file.suffix in SOURCE_SUFFIXES:
            digest.update(f"{file.relative_to(str(folder))}\0{sha256(file)}\n".encode())
    return digest.hexdigest()


def sha256(path: Path) -> str | None:
    """The sha256 of a file's content, 64 hex digits; None when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def check(python: str, request: dict[str, Any]) -> None:
    """See that the environment's packages can be imported and that its server knows the algorithm; exits if not.

    The load client's serves nothing, so its packages are all that is seen to.
    """
    env = {**os.environ, **request["variables"]}
    run([python, "-c", f"import {', '.join(request['imports'])}"], f"importing {', '.join(request['imports'])}", env)
    if request["help"] is None:
        return
    shown = run([python, *request["help"]], "asking the server for its options", env)
    if request["algorithm"] not in shown:
        said = [line for line in shown.splitlines() if any(name in line for name in request["imports"][-1:])]
        sys.exit(
            f"the server's own help, {' '.join(request['help'])}, does not name {request['algorithm']}"
            + "".join(f"; it said: {line.strip()}" for line in said[:1])
        )


def run(
    argv: list[str], what: str, env: Mapping[str, str] | None = None, progress: Callable[[], str] | None = None
) -> str:
    """Run a step and return its output, that of pip shown line by line; exits with what it said when it fails."""
    say(what)
    # Not closed: the lock, which is held as long as anything of an installation that was broken off goes on.
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, close_fds=False
    )
    assert process.stdout is not None
    lines = []
    with said_again(what, progress):
        for line in process.stdout:
            lines.append(line)
            if argv[2:4] == ["pip", "install"]:
                say(line.rstrip("\n"))
        process.wait()
    if process.returncode != 0:
        first = next((n for n, line in enumerate(lines) if line.startswith("ERROR")), max(0, len(lines) - 20))
        sys.exit(f"{what} failed:\n{''.join(lines[first:])}")
    return "".join(lines)


@contextmanager
def said_again(what: str, progress: Callable[[], str] | None) -> Iterator[None]:
    """Say what goes on, and for how long, every few seconds until the block ends."""
    began, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(SAY_EVERY_S):
            say(f"{what}: {time.monotonic() - began:.0f} s" + (f", {progress()}" if progress else ""))

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder; exits when another installation holds it for too long.

    The lock's file is removed by those who prune, under the lock, so it counts only if it is still the one in place.
    """
    path, deadline, said_at = folder.with_name(f"{folder.name}.lock"), time.monotonic() + WAIT_S, -SAY_EVERY_S
    while True:
        with path.open("a+") as lock:
            if locked(lock.fileno(), path):
                os.set_inheritable(lock.fileno(), True)
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
                yield
                return
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
        if time.monotonic() > deadline:
            minutes = round(WAIT_S / 60)
            sys.exit(f"{path}: held by another installation for {minutes} min; end process {holder} if it hangs")
        if time.monotonic() - said_at >= SAY_EVERY_S:
            say(f"{folder}: another installation is going on, process {holder}: waiting for it")
            said_at = time.monotonic()
        time.sleep(0.2)


def locked(descriptor: int, path: Path) -> bool:
    """Take the lock on an open file without waiting; False when another has it, or the path is another file by now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def say(text: str) -> None:
    """Show progress; the last line of stdout is the receipt's, and stderr is for what went wrong."""
    # Whoever asked may be gone by now, with the link to this machine.
    with suppress(BrokenPipeError):
        print(text, flush=True)


def main() -> None:
    """Read the request from the command line and print the receipt; one installation of a folder at a time."""
    request = json.loads(sys.argv[1])
    # A program that is read from stdin would import from the working folder first.
    sys.path = [entry for entry in sys.path if entry]
    folder, installs = Path(request["folder"]), request["action"] == "install"
    receipt = verified(request)
    if receipt is None and (installs or request["wait"]):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            receipt = verified(request)
            if receipt is None and installs:
                receipt = install(request)
    if installs and request["remove_wheels"]:
        shutil.rmtree(request["wheels_folder"], ignore_errors=True)
    say(json.dumps(receipt))


if __name__ == "__main__":
    main()
