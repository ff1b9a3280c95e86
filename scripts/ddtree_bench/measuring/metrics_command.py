"""`metrics`: what a measurement's folder says, computed again from its raw record."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddtree_bench.measuring import measured_folder
from ddtree_bench.measuring.measure_command import show
from ddtree_bench.measuring.measure_options import UsageError, add_computing, slos, tokenizer
from ddtree_bench.measuring.measured_folder import FolderError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `metrics`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder that `measure --out` wrote")
    add_computing(parser)


def run(parsed: argparse.Namespace) -> int:
    """Compute, write and print; return 0, 3 when no request was ok, 1 without a measurement, 2 for wrong arguments."""
    try:
        document = measured_folder.compute(parsed.folder, tokenizer(parsed.tokenizer), slos(parsed.slo))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return show(document, parsed.folder)
