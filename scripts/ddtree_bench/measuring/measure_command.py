"""`measure`: one load on any OpenAI-compatible endpoint, into a folder of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ddtree_bench import __version__
from ddtree_bench.load import cell
from ddtree_bench.load.bodies import request_body
from ddtree_bench.load.progress import Display
from ddtree_bench.load.prompts import PromptError
from ddtree_bench.load.server_samples import sampler_for
from ddtree_bench.load.tokenizer import Tokenizer
from ddtree_bench.measuring import measured_folder, measured_table
from ddtree_bench.measuring.ending import EndRequest
from ddtree_bench.measuring.measure_options import Asked, UsageError, add_arguments, asked, tokenizer
from ddtree_bench.measuring.measured_folder import FolderError
from ddtree_bench.servers.observation import difference, observe

__all__ = ["add_arguments", "run"]

NONE_OK = 3
"""Exit status when no request was ok."""

OBSERVE_S = 5.0
"""Longest wait for the server's own counters."""

SOFTWARE = ("numpy", "pandas", "pyarrow")


def run(parsed: argparse.Namespace) -> int:
    """Measure, write the folder and print what came out; return the exit status.

    0 when a request was ok, 3 when none was, 2 for wrong arguments, and 1 when the result could not be written.
    """
    try:
        what, counting = asked(parsed), tokenizer(parsed.tokenizer)
        measured_folder.prepare(parsed.out)
    except (UsageError, PromptError, FolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with EndRequest() as end, Display() as display:
            _measure(what, counting, parsed.out, end, display)
            document = measured_folder.compute(parsed.out)
    except FolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return show(document, parsed.out)


def show(document: Mapping[str, Any], folder: Path) -> int:
    """Print the content of metrics.json and where it lies; return the exit status."""
    print(measured_table.rendered(document))
    print(f"written: {folder}")
    return 0 if document["requests"]["ok"] else NONE_OK


def _measure(what: Asked, counting: Tokenizer | None, folder: Path, end: EndRequest, display: Display) -> None:
    """Measure and write the raw record."""
    before = observe(what.url, timeout_s=OBSERVE_S, headers=what.headers)
    started = datetime.now(UTC)
    measured = cell.measure(
        what.url,
        what.workload,
        what.prompts,
        what.load,
        what.model,
        abort=end.reason,
        sample=sampler_for(what.url, what.headers),
        limits=what.limits,
        headers=what.headers,
        tokenizer=counting,
        watch=display,
        stagger_s=what.stagger_s,
        seed=what.seed,
        omit=what.omit,
    )
    ended = datetime.now(UTC)
    if measured.aborted:
        display.say(f"ended early: {measured.aborted}; writing what was measured")
    after = observe(what.url, timeout_s=OBSERVE_S, headers=what.headers)
    record = {
        **_asked_for(what),
        "started_at": started.isoformat(),
        "ended_at": ended.isoformat(),
        "planned": measured.planned,
        "aborted": measured.aborted,
        "client": measured.client,
        "counters": difference(before, after),
        "server_before": before,
        "server_after": after,
        "versions": _versions(),
    }
    measured_folder.write_raw(folder, measured.requests, measured.server_samples, record)


def _asked_for(what: Asked) -> dict[str, Any]:
    """What was asked for, as a record; the headers, which may hold a key, are no part of it."""
    body = request_body(what.workload, what.prompts[0], what.model)
    return {
        "url": what.url,
        "model": what.model,
        "method": what.method,
        "workload": asdict(what.workload),
        "load": asdict(what.load),
        "stagger_s": what.stagger_s,
        "seed": what.seed,
        "limits": asdict(what.limits),
        "slos": asdict(what.slos) if what.slos else None,
        "tokenizer": what.tokenizer,
        "sent": {name: value for name, value in body.items() if name not in ("prompt", "messages", *what.omit)},
    }


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in SOFTWARE}
    return {"ddtree_bench": __version__, "python": sys.version.split()[0], **packages}
