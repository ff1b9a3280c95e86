"""What was found about a target: one matter each, as a table and as an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table

from ddtree_bench.targets.launcher import TargetError

TABLE_WIDTH = 140

Level = Literal["ok", "note", "problem"]


class NotReady(TargetError):
    """Targets lack something; the message has each problem with its remedy."""


@dataclass(frozen=True)
class Finding:
    """What was found about one matter of a target; `remedy` is empty where none is needed or `words` have it."""

    target: str
    what: str
    level: Level
    words: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.target}: {self.what}: {self.words}" + (f"; {self.remedy}" if self.remedy else "")


def refuse_problems(findings: Sequence[Finding]) -> None:
    """Raise NotReady when there are problems among the findings, with each of them."""
    problems = [finding for finding in findings if finding.level == "problem"]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise NotReady("\n  ".join([f"{count}, nothing was started:", *map(str, problems)]))


def findings_table(findings: Sequence[Finding]) -> str:
    """Return findings as a table, a row each."""
    table = Table()
    for head in ("target", "what", "level", "found"):
        table.add_column(head, no_wrap=head != "found")
    for finding in findings:
        table.add_row(finding.target, finding.what, finding.level, finding.words)
    text = StringIO()
    # Brackets in paths and addresses are no markup.
    Console(file=text, width=TABLE_WIDTH, markup=False).print(table)
    return text.getvalue().rstrip()
