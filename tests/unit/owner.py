"""A measuring process for tests: takes the lease, starts the tiny server, says so, and waits to be told to end.

Prints one line of JSON with the process ids once the server answers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ddtree_bench.servers import api
from ddtree_bench.targets import lifeline
from ddtree_bench.targets.launcher import Launch
from ddtree_bench.targets.local import LocalLauncher


def main(lease_directory: Path, log_path: Path, tie: bool, *server_arguments: str) -> None:
    launcher = LocalLauncher(lease_directory, "test")
    with lifeline.Interruption() as interruption:
        if tie:
            with lifeline.tied_to_ancestors():
                measure(launcher, interruption, log_path, server_arguments)
        else:
            measure(launcher, interruption, log_path, server_arguments)


def measure(
    launcher: LocalLauncher, interruption: lifeline.Interruption, log_path: Path, server_arguments: tuple[str, ...]
) -> None:
    port = launcher.free_port()
    argv = (sys.executable, str(Path(__file__).with_name("tiny_server.py")), "--port", str(port), *server_arguments)
    with launcher.acquire("owner", 0, print):
        try:
            launcher.start(Launch("tiny", argv, port, log_path, stop_grace_s=2))
            while not api.health(launcher.base_url()):
                time.sleep(0.05)
            state = json.loads(log_path.with_suffix(".state.json").read_text())
            print(json.dumps({"port": port, **state}), flush=True)
            time.sleep(600)
        finally:
            with interruption.shielded():
                launcher.stop()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "tie", *sys.argv[4:])
    except lifeline.Interrupted as interrupted:
        sys.exit(interrupted.exit_status)
