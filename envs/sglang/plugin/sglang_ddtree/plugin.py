"""The entry point: SGLang calls `load` early in each of its processes."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


def load() -> None:
    """Register DDTREE and its options; where that is impossible, leave SGLang as it is and say why in one line."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        from sglang_ddtree import release

        release.check_version()
        from sglang_ddtree import algorithm, hooks, progress_lines

        algorithm.register()
        hooks.install()
        progress_lines.install()
    except Exception as error:
        reason = f"sglang_ddtree cannot be loaded: {error}".replace("\n", " ")
        logger.error(reason)
        if _asks_for_ddtree(sys.argv[1:]):
            raise SystemExit(reason) from error

        # The same may stand in a --config file, which is read later.
        def refuse_options(_result: Any, parser: argparse.ArgumentParser) -> None:
            _add_refused_options(parser, reason)

        def refuse_algorithm(_cls: type, args: argparse.Namespace) -> None:
            if (args.speculative_algorithm or "").upper() == "DDTREE":
                raise SystemExit(reason)

        HookRegistry.register(f"{SERVER_ARGS}.add_cli_args", refuse_options, HookType.AFTER)
        HookRegistry.register(f"{SERVER_ARGS}.from_cli_args", refuse_algorithm, HookType.BEFORE)


def _asks_for_ddtree(arguments: Sequence[str]) -> bool:
    """Whether a command line names the algorithm or one of its options."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    named = any(word.startswith("--speculative-ddtree-") for word in words)
    chosen = any(
        option == "--speculative-algorithm" and value.upper() == "DDTREE" for option, value in itertools.pairwise(words)
    )
    return named or chosen


def _add_refused_options(parser: argparse.ArgumentParser, reason: str) -> None:
    class Refuse(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_args: Any, **_kwargs: Any) -> None:
            parser.error(reason)

    for option in ("budget", "topk-cap", "allow-hybrid-unsafe", "round-log"):
        parser.add_argument(f"--speculative-ddtree-{option}", nargs="?", action=Refuse, help=argparse.SUPPRESS)
