"""The options of DDTREE: on SGLang's command line, in `Engine(...)`, on the server's arguments and in /server_info."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

DEFAULT_BUDGET = 16
PREFIX = "speculative_ddtree_"
START_ID_VARIABLE = "SGLANG_DDTREE_START_ID"
"""Environment variable whose value /server_info repeats, so that a client can tell which start it talks to."""

_ATTRIBUTE = "_ddtree_options"  # SGLang pickles a record's attributes into its child processes


class OptionError(ValueError):
    """An option cannot be used; the message names it, its value and the remedy."""


@dataclass(frozen=True)
class Options:
    """What the command line may say. `topk_cap` is by default the budget, and cut to it."""

    budget: int = DEFAULT_BUDGET
    topk_cap: int | None = None
    allow_hybrid_unsafe: bool = False
    round_log: str | None = None

    def __post_init__(self) -> None:
        """Raise OptionError for a number below 1."""
        for name in ("budget", "topk_cap"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{flag(name)} {value}: must be an integer of at least 1")

    @property
    def effective_cap(self) -> int:
        """Candidates a depth: more than `budget` could never be chosen."""
        return self.budget if self.topk_cap is None else min(self.topk_cap, self.budget)


def flag(name: str) -> str:
    """The command line's spelling of an option."""
    return "--" + (PREFIX + name).replace("_", "-")


def add_to_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options to SGLang's parser; `--config` files are merged into its arguments and need nothing more."""
    group = parser.add_argument_group("DDTREE (sglang_ddtree)")
    group.add_argument(
        flag("budget"),
        type=_at_least_one,
        help=f"Nodes of the draft tree, the root not counted; the target verifies one more. Default: {DEFAULT_BUDGET}.",
    )
    group.add_argument(
        flag("topk_cap"),
        type=_at_least_one,
        help="Most candidate tokens a depth. Default: the budget; a larger one is cut to it.",
    )
    group.add_argument(
        flag("allow_hybrid_unsafe"),
        action="store_true",
        default=None,
        help="Serve a hybrid (Mamba, gated delta net) target although its state is not proven right under a tree.",
    )
    group.add_argument(flag("round_log"), metavar="PATH", help="Write one JSON line a verified round to this file.")


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def given(values: Mapping[str, Any]) -> Options | None:
    """The options among keyword arguments of full names; None if there is none. Raises OptionError."""
    found: dict[str, Any] = {field.name: values.get(PREFIX + field.name) for field in fields(Options)}
    found = {name: value for name, value in found.items() if value is not None}
    return Options(**found) if found else None


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], Options | None]:
    """Keyword arguments without the options, and the options among them. Raises OptionError."""
    ours = {PREFIX + field.name for field in fields(Options)}
    return {name: value for name, value in values.items() if name not in ours}, given(values)


def attach(server_args: Any, options: Options | None) -> Any:
    """Let a ServerArgs record carry options to every process of the server; returns the record."""
    if options is not None:
        setattr(server_args, _ATTRIBUTE, options)
    return server_args


def of(server_args: Any) -> Options:
    """The options that a record carries, or the defaults."""
    return getattr(server_args, _ATTRIBUTE, None) or Options()


def require_algorithm(server_args: Any, algorithm: str | None) -> None:
    """Raise OptionError where options are given but the algorithm, `algorithm`, is another one."""
    options: Options | None = getattr(server_args, _ATTRIBUTE, None)
    if options is not None and (algorithm or "").upper() != "DDTREE":
        name = next(name for name, value in asdict(options).items() if value != getattr(Options(), name, None))
        raise OptionError(f"{flag(name)} needs --speculative-algorithm DDTREE, not {algorithm}")


def echoed(server_args: Any, algorithm: str | None) -> dict[str, Any]:
    """What /server_info shows: the resolved options of a DDTREE server, and the start that it belongs to."""
    shown: dict[str, Any] = {}
    if (algorithm or "").upper() == "DDTREE":
        options = of(server_args)
        shown = {PREFIX + name: value for name, value in asdict(options).items()}
        shown[PREFIX + "topk_cap"] = options.effective_cap
    start_id = os.environ.get(START_ID_VARIABLE)
    return shown if start_id is None else {**shown, "ddtree_start_id": start_id}
