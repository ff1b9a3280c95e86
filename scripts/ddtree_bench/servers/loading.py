"""How far a server has come with its start, from the end of its log."""

from __future__ import annotations

import re

_BAR = re.compile(
    r"(?P<what>[^%]*?)(?: \([^()]*\))?:\s+(?P<percent>\d+)%(?: Completed |\|[^|]*)\| (?P<done>\d+)/(?P<of>\d+) \["
)
"""A progress bar of SGLang by tqdm, drawn (`40%|████      | 2/5 [`) or in words (`45% Completed | 29/64 [`)."""


def loading_line(log_tail: str) -> str:
    """Return what the end of a log says of a server that loads: the percentage of its last bar, and its last line.

    Bars are drawn over one another, and the last counts. "" for an empty log.
    """
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    if not lines:
        return ""
    bars = [match for line in lines if (match := _BAR.match(line))]
    if not bars:
        return lines[-1]
    bar = bars[-1]
    told = f"{bar['what']}: {bar['percent']} % ({bar['done']} of {bar['of']})"
    return told if _BAR.match(lines[-1]) else f"{told}; {lines[-1]}"
