"""The command line: `python -m ddtree_bench COMMAND`: the commands that the workflow offers, and those without one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_bench import __version__
from ddtree_bench.commands import COMMANDS, run_command
from ddtree_bench.config import ConfigError, read_files
from ddtree_bench.config.generate import generated_files, write_generated
from ddtree_bench.measuring import calibrate_command, measure_command, metrics_command, second_opinion_command
from ddtree_bench.project import Project, open_project
from ddtree_bench.rule_log import USER_ERRORS
from ddtree_bench.serve_command import choose_server, serve_project

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "config" / "config.yaml"

MEASURING = {
    "measure": ("measure any OpenAI-compatible endpoint that is up, into a folder of its own", measure_command),
    "metrics": ("compute a measurement's metrics again from its raw record", metrics_command),
    "second-opinion": ("measure with SGLang's bench_serving as well, and hold both together", second_opinion_command),
    "calibrate": ("say how exact the client is on this machine", calibrate_command),
}
"""Commands that need no configuration: what each does, and the module with its arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.function(parsed))
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is still in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_bench", description="Benchmark DDTree speculative decoding."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (help_text, _) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        _add_config(command)
        command.set_defaults(function=_run_project_command, command=name)
    _add_serve(commands)
    for name, (help_text, module) in MEASURING.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        module.add_arguments(command)
        command.set_defaults(function=module.run)
    generate = commands.add_parser(
        "generate", help="write the files made from code: schema, default configuration, reference pages"
    )
    generate.add_argument("--check", action="store_true", help="only say whether they are up to date")
    generate.set_defaults(function=_generate)
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="YAML file laid over config/config.yaml; may be given more than once",
    )


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "serve", help="run one configured server in the foreground, exactly as a run starts it"
    )
    _add_config(command)
    command.add_argument("--method", required=True, choices=("AR", "DFLASH", "DDTREE"), help="how tokens are decoded")
    command.add_argument("--budget", type=int, help="nodes of the draft tree; by default that of the sweep")
    command.add_argument("--topk-cap", type=int, help="most candidates a depth; by default that of the sweep")
    command.add_argument("--block-size", type=int, help="the drafter's block; by default the one it was trained for")
    command.add_argument("--target", help="a key of targets; by default the first of the sweep")
    command.add_argument("--model", help="a key of models; by default the first of the sweep")
    command.add_argument("--port", type=int, default=0, help="port to listen on; by default a free one")
    command.set_defaults(function=_serve)


def _open(parsed: argparse.Namespace) -> Project:
    files = [str(path) for path in parsed.config]
    return open_project(read_files([DEFAULT_CONFIG, *parsed.config]), ROOT, ROOT / "results", files)


def _run_project_command(parsed: argparse.Namespace) -> int:
    print(run_command(parsed.command, _open(parsed), _report))
    return 0


def _serve(parsed: argparse.Namespace) -> int:
    project, server = choose_server(read_files([DEFAULT_CONFIG, *parsed.config]), ROOT, vars(parsed))
    serve_project(project, server, parsed.port, _report)
    return 0


def _generate(parsed: argparse.Namespace) -> int:
    if not parsed.check:
        for path in write_generated(ROOT):
            print(f"written: {path}")
        return 0
    stale = [path for path, text in generated_files(ROOT).items() if not path.exists() or path.read_text() != text]
    if stale:
        raise ConfigError(
            [f"{path}: is out of step with the models; run: python -m ddtree_bench generate" for path in stale]
        )
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
