"""The load client on the target: it measures one cell beside the server, and needs nobody until it has done.

    python -m ddtree_bench.load.on_target FOLDER

FOLDER/request.json says what is to be measured. The outcome is written beside it, `done.json` last.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree_bench.load import cell_work
from ddtree_bench.load.cell_work import CellWork
from ddtree_bench.load.observed import measure_observed
from ddtree_bench.load.outcome import write_error, write_outcome
from ddtree_bench.load.telemetry import Telemetry, program
from ddtree_bench.records.files import write_json
from ddtree_bench.records.store import SERVER_LOG
from ddtree_bench.targets import host_tools
from ddtree_bench.targets.commands import LocalStream
from ddtree_bench.targets.ssh import journal

REQUEST = "request.json"

LOG_S = 60.0
"""How long the command that prints the server's log may take."""


@dataclass(frozen=True)
class ClientRequest:
    """What a client on the target is asked for.

    Attributes
    ----------
    id : str
        The name under which the outcome is stored once and not again.
    work : CellWork
        The cell; its base URL is the one on the target.
    server_pid : int or None
        The server's process there; the cell ends with it.
    log_argv : sequence of str
        The command that prints the server's log from its start on; empty where there is none.
    draft : dict
        What the record of the cell says before it is measured. It lies here so that a later run can complete it.
    owner : dict
        Whose workflow asks, and since when: the fields of lease.Owner.
    """

    id: str
    work: CellWork
    server_pid: int | None
    log_argv: Sequence[str]
    draft: Mapping[str, Any]
    owner: Mapping[str, Any]


def write_request(request: ClientRequest, folder: Path) -> None:
    """Write what a client is asked for into a folder."""
    fields = {name: getattr(request, name) for name in ("id", "server_pid", "draft", "owner")}
    write_json(folder / REQUEST, {**fields, "log_argv": list(request.log_argv), "work": asdict(request.work)})


def read_request(folder: Path) -> ClientRequest:
    """Read what a client is asked for. Raises OSError, ValueError, KeyError or TypeError when it is none."""
    told = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    if not isinstance(told["draft"], dict):
        raise TypeError("its draft is no mapping")
    return ClientRequest(**{**told, "work": cell_work.from_tree(told["work"])})


def main(folder: Path) -> None:
    """Measure what the folder asks for and write the outcome, or why there is none."""
    try:
        request = read_request(folder)
        outcome = measure_observed(
            request.work,
            fetch_log=lambda: _fetched_log(request.log_argv, folder / SERVER_LOG),
            ended=lambda: _ended(request.server_pid),
            telemetry=Telemetry(LocalStream, program(sys.executable, str(host_tools.PACKAGE.parent))),
        )
        write_outcome(outcome, folder)
    except Exception as error:
        write_error(f"{type(error).__name__}: {error}", folder)
        raise


def _ended(pid: int | None) -> str | None:
    return None if pid is None or Path(f"/proc/{pid}").exists() else f"has ended (process {pid} is gone)"


def _fetched_log(argv: Sequence[str], path: Path) -> Path | None:
    """The file with the server's log so far. Raises RuntimeError when the command that prints it fails."""
    if not argv:
        return None
    time.sleep(journal.LAG_S)
    with path.open("wb") as file:
        told = subprocess.run(argv, stdout=file, stderr=subprocess.PIPE, timeout=LOG_S, check=False)
    if told.returncode != 0:
        raise RuntimeError(f"{argv[0]} gave no log of the server: {told.stderr.decode(errors='replace').strip()}")
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
