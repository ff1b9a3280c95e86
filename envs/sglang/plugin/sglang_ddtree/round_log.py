"""A line of JSON for each round of a batch, for `--speculative-ddtree-round-log PATH`.

The file is appended to. Each start of a server writes a line with one key, `meta`: the time, the process, the releases,
the models and the widths. Every other line is a round, with these keys:

    time              seconds of the Unix clock when the round's result was processed
    sequences         requests that the round counts for
    discarded         requests that were computed too, but had ended before (overlap scheduling)
    rows              rows of the target's forward, those of discarded requests included
    committed         tokens that the answers grew by
    accept_histogram  [k]: number of requests with k accepted drafts
    nodes             drafts verified, roots not counted
    branching_nodes   nodes with two children or more, roots included
    depth             depth of the deepest tree's deepest node
    cuda_graph        whether the target's forward was a CUDA graph's replay
    seconds           time of each stage (`rounds.STAGES`): device times, on a CPU wall times. `head_topk` is missing
                      where it is part of a captured graph on a device whose clock cannot be read there; `draft` then
                      includes it
    requests          rid, accepted, committed, branching_nodes and depth, each a list with an entry a request
    dp_rank           the data-parallel replica, only where there are several

`sequences`, `committed`, `accept_histogram`, `nodes`, `branching_nodes`, `depth` and `seconds` mean the same in the
round log of the embedded engine.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sglang_ddtree.options import OptionError, flag
from sglang_ddtree.rounds import Round, describe

logger = logging.getLogger(__name__)


class RoundLog:
    """Appends rounds to a file. One that cannot be written any more ends there, and serving goes on.

    `meta` is what the first line says beside time and process; `tags` are added to every round's line. Raises
    OptionError where the file cannot be opened.
    """

    def __init__(self, path: str, meta: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        self._tags = tags
        self._file: BinaryIO | None = open_log(path)
        self._append({"meta": {"time": time.time(), "pid": os.getpid(), **meta}})

    def __call__(self, done: Round) -> None:
        """Append a round."""
        self._append({"time": time.time(), **describe(done), **self._tags})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            # One write a line: replicas that share the file do not mix theirs.
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            logger.warning("%s: %s; no more rounds are logged", flag("round_log"), error)
            self._file = None


def check_writable(path: str) -> None:
    """Raise OptionError unless `open_log` could write there; nothing is made."""
    place = Path(path).absolute()
    if place.is_file():
        possible = os.access(place, os.W_OK)
    else:
        above = next(folder for folder in place.parents if folder.exists())
        possible = not place.exists() and above.is_dir() and os.access(above, os.W_OK)
    if not possible:
        raise OptionError(f"{flag('round_log')} {path}: cannot be written; give a path that can be")


def open_log(path: str) -> BinaryIO:
    """The file, to be appended to without a buffer, with its folders made. Raises OptionError."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open("ab", buffering=0)
    except OSError as error:
        raise OptionError(
            f"{flag('round_log')} {path}: cannot be written ({error}); give a path that can be"
        ) from error
