"""Install a wheelhouse on the machine that this program runs on: standard library only, sent to any target.

    python - '{"action": "install", "folder": ..., ...}' < installer.py

Action `verify` prints the receipt of the folder when it is the environment asked for, and null when it is not.
Action `install` makes it so and prints the receipt. A receipt is written last: a folder without one is half made,
and is made anew.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
    return receipt if receipt["versions"] == installed_versions(folder) else None


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
    if tag != request["python"]:
        sys.exit(f"the wheelhouse is for {request['python']}, but {sys.executable} is {tag}; use that Python here")
    began = time.monotonic()
    folder = Path(request["folder"])
    if folder.exists():
        say(f"{folder}: not the environment that is wanted, or half made: making it anew")
        shutil.rmtree(folder)
    python = str(folder / "bin" / "python")
    run([sys.executable, "-m", "venv", str(folder)], "making the virtual environment")
    requirements = folder / "requirements.txt"
    wheels = Path(request["wheels_folder"])
    requirements.write_text(
        "".join(
            f"{wheel['name']} @ {(wheels / wheel['file']).as_uri()} --hash=sha256:{wheel['sha256']}\n"
            for wheel in request["wheels"]
        )
    )
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += ["--no-index", "--no-deps"]
    # Modules are compiled when they are first imported, below: a third of the time, for the tenth that is used.
    run([*pip, "--require-hashes", "--no-compile", "--requirement", str(requirements)], "installing the wheels")
    run([python, "-c", f"import {', '.join(request['imports'])}"], f"importing {', '.join(request['imports'])}")
    shown = run([python, *request["help"]], "asking the server for its options")
    if request["algorithm"] not in shown:
        sys.exit(f"the server's own help, {' '.join(request['help'])}, does not name {request['algorithm']}")
    receipt = {
        **{name: request[name] for name in ("engine", "key", "manifest_sha256", "folder")},
        "python": python,
        "versions": installed_versions(folder),
        "seconds": round(time.monotonic() - began, 1),
    }
    partial = folder / "receipt.partial"
    partial.write_text(json.dumps(receipt, indent=1))
    partial.replace(folder / "receipt.json")
    return receipt


def run(argv: list[str], what: str) -> str:
    """Run a step and return its output, shown line by line; exits with what it said when it fails."""
    say(what)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if argv[2:4] == ["pip", "install"]:
            say(line.rstrip("\n"))
    if process.wait() != 0:
        first = next((n for n, line in enumerate(lines) if line.startswith("ERROR")), max(0, len(lines) - 20))
        sys.exit(f"{what} failed:\n{''.join(lines[first:])}")
    return "".join(lines)


def say(text: str) -> None:
    """Show progress; the last line of stdout is the receipt's, and stderr is for what went wrong."""
    print(text, flush=True)


def main() -> None:
    """Read the request from the command line and print the receipt; one installation of a folder at a time."""
    request = json.loads(sys.argv[1])
    folder = Path(request["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        receipt = verified(request)
        if receipt is None and request["action"] == "install":
            receipt = install(request)
    print(json.dumps(receipt))


if __name__ == "__main__":
    main()
