"""`second-opinion`: the same load by SGLang's bench_serving and by our client, on a server that is up."""

from __future__ import annotations

import argparse
import os
import sys

from ddtree_bench.environments.variables import engine_variables
from ddtree_bench.load import requests_table
from ddtree_bench.load.prompts import PromptError
from ddtree_bench.measuring import bench_serving, measure_command, measured_folder, second_opinion
from ddtree_bench.measuring.measure_options import UsageError, asked, tokenizer
from ddtree_bench.measuring.measure_options import add_arguments as add_measure_arguments
from ddtree_bench.measuring.measured_folder import FolderError
from ddtree_bench.servers import api

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `second-opinion`: those of `measure`, and where SGLang is installed."""
    add_measure_arguments(parser)
    parser.add_argument(
        "--python", required=True, metavar="PATH", help="the Python of an environment in which SGLang is installed"
    )
    parser.add_argument(
        "--build", choices=("cuda13", "cpu"), default="cuda13", help="the build of that SGLang; default: %(default)s"
    )


def run(parsed: argparse.Namespace) -> int:
    """Let both clients measure and print them side by side; return the exit status.

    0 when both had an answer, 3 when ours had none, 2 for wrong arguments, and 1 when bench_serving failed or the
    result could not be written.
    """
    try:
        what = asked(parsed)
        tokenizer(bench_serving.check(what))
        measured_folder.prepare(parsed.out)
        env = {**os.environ, **engine_variables("sglang", parsed.build)}
        theirs = bench_serving.run(parsed.python, what, parsed.out / "bench_serving", env)
        api.flush_cache(what.url, what.headers)
    except (UsageError, PromptError, FolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (bench_serving.OpinionFailed, api.ApiError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    status = measure_command.run(parsed)
    if status == 0:
        ours = second_opinion.restated(requests_table.read(parsed.out / measured_folder.REQUESTS))
        document = measured_folder.compute(parsed.out)
        print(second_opinion.rendered(second_opinion.compare(theirs, ours, document)))
    return status
