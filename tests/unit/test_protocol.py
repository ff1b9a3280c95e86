"""Measuring code does not change unnoticed: cells of an older protocol must not pass for those of a newer one."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import ddtree_bench
from ddtree_bench import keys

PACKAGE = Path(ddtree_bench.__file__).parent
MEASURING = (
    "load",
    "servers",
    "environments/variables.py",
    "run.py",
    "run_start.py",
    "server_start.py",
    "running_server.py",
    "link_watch.py",
    "client_here.py",
    "client_on_target.py",
    "targets/local.py",
    "targets/watchdog.py",
    "targets/external.py",
    "targets/telemetry.py",
    "targets/ssh/launcher.py",
    "targets/ssh/remote_server.py",
    "targets/ssh/kept_forward.py",
    "targets/ssh/forward.py",
    "targets/ssh/pulse.py",
)
NOT_MEASURING = ("load/calibration", "load/progress.py", "load/live.py", "servers/releases_page.py")
"""What measures the client, shows how it stands, or documents; no cell goes through it."""
ACCEPTED = Path(__file__).with_name("protocol.json")


def measuring_files() -> list[Path]:
    files: list[Path] = []
    for name in MEASURING:
        path = PACKAGE / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [path for path in files if not path.relative_to(PACKAGE).as_posix().startswith(NOT_MEASURING)]


def code(path: Path) -> str:
    """The syntax tree of a file without docstrings, so that comments and layout do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def digest() -> str:
    sources = [(path.relative_to(PACKAGE).as_posix(), code(path)) for path in measuring_files()]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def test_measuring_code_is_that_of_the_protocol_number() -> None:
    accepted = json.loads(ACCEPTED.read_text())[str(keys.PROTOCOL)]
    assert digest() in {entry["digest"] for entry in accepted}, (
        f"The measuring code (digest {digest()}) is not that of protocol {keys.PROTOCOL}. If what is measured changes, "
        f"raise PROTOCOL in {keys.__file__}, so that everything is measured again. If it does not, add the digest with "
        f"the reason why not to {ACCEPTED}."
    )


def test_every_accepted_digest_has_a_reason() -> None:
    for entries in json.loads(ACCEPTED.read_text()).values():
        assert all(len(entry["digest"]) == 64 and entry["reason"] for entry in entries)


def test_the_digest_covers_the_load_client_and_the_session() -> None:
    names = {path.name for path in measuring_files()}
    assert {"reader.py", "connection.py", "cell.py", "warmup.py", "run_start.py", "server_start.py"} <= names
    assert {"arrivals.py", "cell_prompts.py"} <= names
    assert {"ready.py", "local.py", "external.py"} <= names
