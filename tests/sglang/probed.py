"""A DDTREE server with the test-only plugin of `probe/` in it, which writes down what happens, or breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_server import SGLangServer
from trained_models import ModelPair

PROBE = Path(__file__).with_name("probe")


def probed_server(
    models: ModelPair, budget: int, folder: Path, extra_args: Sequence[str] = (), *, torch_attention: bool = True
) -> SGLangServer:
    """A server that the probe watches in `folder`; its log is `folder`/log.

    With `torch_attention` plain torch computes attention, some hundred times faster than Triton's interpreter.
    """
    environment = {"PYTHONPATH": str(PROBE), "DDTREE_PROBE": str(folder)}
    if torch_attention:
        environment["DDTREE_PROBE_ATTENTION"] = "torch"
    return SGLangServer(
        models.target,
        drafter_path=models.drafter,
        algorithm="DDTREE",
        budget=budget,
        extra_args=("--sleep-on-idle", *extra_args),
        env=environment,
        log_path=folder / "log",
    )


@contextlib.contextmanager
def mutant(folder: Path, name: str) -> Iterator[None]:
    """Let the server that is watched in `folder` walk wrongly in the block, as of probe/ddtree_probe/mutants.py."""
    control = folder / "mutant"
    control.write_text(name)
    try:
        yield
    finally:
        control.unlink()


@contextlib.contextmanager
def saved_rounds(folder: Path) -> Iterator[Path]:
    """Save every round of the block into the folder that is yielded, in files numbered as the rounds are."""
    rounds, saved = folder / "rounds", folder / "saved_rounds"
    saved.mkdir()
    rounds.symlink_to(saved, target_is_directory=True)
    try:
        yield saved
    finally:
        rounds.unlink()
