"""`serve` as a process for tests: one toy server of the reference engine until it is told to end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from ddtree_bench.plan import ModelRef, Server
from ddtree_bench.servers.command_line import Place
from ddtree_bench.servers.ready import ServerFailed
from ddtree_bench.servers.serve import serve
from ddtree_bench.targets.local import LocalLauncher

TOY = ModelRef("toy", "1")
TREE = Server("toy-tree", "local", "reference", "e" * 64, TOY, ModelRef("toy-dflash", "1"), "DDTREE", 8, 4, 8)


def main(folder: Path, changes: dict[str, object]) -> None:
    launcher = LocalLauncher(folder, "test")
    server = replace(TREE, **changes)  # type: ignore[arg-type]
    place = Place(sys.executable, launcher.free_port(), "s1")
    serve(
        launcher,
        server,
        place,
        log_path=folder / "server.log",
        lease_wait_s=0,
        stop_grace_s=5,
        timeout_s=120,
        report=lambda line: print(line, file=sys.stderr),
        announce=lambda url: print(url, flush=True),
    )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except ServerFailed as failed:
        sys.exit(str(failed))
