"""An SGLang plugin for tests alone: what happens inside a DDTREE server is written down, or broken on purpose.

This folder's parent on PYTHONPATH makes SGLang load it; it does nothing unless DDTREE_PROBE names a folder:

* `<folder>/mutant` holds the name of a mutant of `mutants.py` while it is to be used.
* `<folder>/rounds` is a folder: every verified round is saved in it, numbered from 0.
* `<folder>/leak` exists: a KV slot is taken and never freed, once.

With DDTREE_PROBE_ATTENTION=torch, attention is computed by `torch_attention.py` instead of Triton's interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path


def load() -> None:
    """SGLang's entry point: wrap what is to be probed once the scheduler's process has imported it."""
    folder = os.environ.get("DDTREE_PROBE")
    if folder is None:
        return
    from sglang_ddtree import hooks

    original = hooks.install_in_scheduler

    def install_in_scheduler() -> None:
        from ddtree_probe import instruments, torch_attention

        instruments.install(Path(folder))
        original()
        if os.environ.get("DDTREE_PROBE_ATTENTION") == "torch":
            torch_attention.install()

    hooks.install_in_scheduler = install_in_scheduler
