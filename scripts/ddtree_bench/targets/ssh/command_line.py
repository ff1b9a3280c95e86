"""Command lines that are exact in any shell of a login, and how the processes of one are found again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from ddtree_bench.targets.launcher import TargetError

MARK = "DDTREE_BENCH_COMMAND"
"""Environment variable by which every process of one command is known, whatever became of its parents."""

UNSAFE = re.compile(rb"[^A-Za-z0-9 _./:=,+@%-]")

DECODE = 'eval "exec $(printf %b "$0")"'
"""Script of sh that becomes the command whose words are its $0."""

END_MARKED = """\
for file in $(grep -lszxF -- "$0" /proc/[0-9]*/environ); do
    process=${file#/proc/}
    kill -KILL "${process%/environ}"
done
"""


def render(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a line for the login's shell that becomes the command `argv`, with `env` added to its environment.

    Shells differ in what they make of quotes, backslashes, newlines and "!", so that words for sh are written with
    few characters, the rest as octal numbers; it may be bash, dash, zsh, ksh, fish or tcsh. Raises TargetError for a
    NUL, which no argument can hold.
    """
    words = shlex.join(["env", *(f"{name}={value}" for name, value in env.items()), *argv])
    if "\0" in words:
        raise TargetError(f"the command {argv[0]} has an argument with a NUL character, which no process can be given")
    encoded = UNSAFE.sub(lambda found: b"\\0%03o" % found[0][0], words.encode(errors="surrogateescape"))
    return f"exec sh -c '{DECODE}' '{encoded.decode()}'"


def end_marked(mark: str) -> list[str]:
    """Return the command that kills the processes of a command that was marked, those of this user."""
    return ["sh", "-c", END_MARKED, f"{MARK}={mark}"]
