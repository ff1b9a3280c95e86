"""A stage of the drafter's training as a rule runs it: alone in its folder, ended with the workflow, and logged."""

from __future__ import annotations

import fcntl
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from ddtree_bench.client_machine import training_lease
from ddtree_bench.drafter_training import DrafterTraining
from ddtree_bench.project import Project
from ddtree_bench.targets.lifeline import Interrupted, Interruption, tied_to_ancestors


class Tee:
    """A stream whose text goes to two, at once."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._streams = (first, second)

    def write(self, text: str) -> int:
        """Write to both and pass on what they hold; returns the characters written."""
        for stream in self._streams:
            stream.write(text)
            stream.flush()
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


@contextmanager
def training_stage(log: Path | str, project: Project, stage: str) -> Iterator[None]:
    """Within the block this process has the training's folder to itself, and what it prints goes to `log` too.

    It waits for a process of an earlier, killed workflow that is still ending, and for whoever measures on this
    machine, longer than `lease_wait_s` for nobody (TargetBusy). When this workflow is killed or
    interrupted, the block ends, and the process with the status of a shell. Enter it in the main thread.
    """
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, ExitStack() as stack:
        stack.enter_context(redirect_stdout(cast(TextIO, Tee(sys.stdout, file))))
        stack.enter_context(redirect_stderr(cast(TextIO, Tee(sys.stderr, file))))
        try:
            folder = DrafterTraining.of(project).folder
            with Interruption(), tied_to_ancestors(), _alone(folder), training_lease(project, stage, _say):
                yield
        except Interrupted as interrupted:
            print(interrupted, file=sys.stderr)
            sys.exit(interrupted.exit_status)
        except Exception:
            file.write(traceback.format_exc())
            raise


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "training.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{folder}: waiting for another process that trains there to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
