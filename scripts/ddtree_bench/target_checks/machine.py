"""Checks of the facts of a machine on which servers are to be started, other than its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree_bench.target_checks.facts import Facts
from ddtree_bench.target_checks.findings import Finding
from ddtree_bench.target_checks.planned import PlannedTarget
from ddtree_bench.targets import lease

CLOCK_S = 5.0
"""A clock that differs by more is worth a note: what the target writes has times of its own."""

PATH_PROBLEMS = {
    "missing": ("there is nothing at {path} there", "mend the path, or put the model there"),
    "unreadable": ("{path} cannot be read by this login", "mend its permissions"),
    "unconfigured": ("{path} has no config.json that can be read", "give the folder of the model itself"),
}


def check_tools(target: PlannedTarget, facts: Facts) -> Finding:
    """See that the commands that are used are there."""
    missing = facts.all("tool_missing")
    if missing:
        return target.finding("tools", "problem", f"not found there: {', '.join(missing)}", "install these commands")
    return target.finding("tools", "ok", f"{facts.one('platform')}, a POSIX shell and the commands that are used")


def check_port(target: PlannedTarget, facts: Facts) -> Iterator[Finding]:
    """See that nobody else listens on the servers' port, if they have one."""
    port, holder = target.spec.port, facts.one("port_holder")
    if port == 0:
        return
    if holder is None:
        yield target.finding("port", "ok", f"{port} is free")
    elif lease_holder(facts) is not None:
        yield target.finding("port", "note", f"{port} is in use by {holder}, while a run holds the lease")
    else:
        remedy = f"end it, or set targets.{target.name}.port to another, or to 0 for a free one"
        yield target.finding("port", "problem", f"{port} is in use by {holder}", remedy)


def check_models(target: PlannedTarget, states: Sequence[str]) -> Iterator[Finding]:
    """See that the models are there; `states` are the program's words for the paths of `target.model_paths`."""
    for (key, path), state in zip(target.model_paths.items(), states, strict=True):
        if state in PATH_PROBLEMS:
            words, remedy = PATH_PROBLEMS[state]
            yield target.finding("model", "problem", f"{key}: {words.format(path=path)}", remedy)
        else:
            yield target.finding("model", "ok", path)


def check_lease(target: PlannedTarget, holder: str | None) -> Finding:
    """See that nobody holds the lease, or else that a run waits."""
    if holder is None:
        return target.finding("lease", "ok", f"{target.lease} is free")
    words, wait_s = f"{target.lease} is held by {holder}", target.spec.lease_wait_s
    if wait_s > 0:
        return target.finding("lease", "note", f"{words}; a run waits for its end, up to {wait_s:g} s")
    remedy = f"wait for that run to end, or set targets.{target.name}.lease_wait_s"
    return target.finding("lease", "problem", words, remedy)


def lease_holder(facts: Facts) -> str | None:
    """Return who holds the lease of a machine, in words; None when nobody does."""
    text = facts.one("lease_holder")
    return None if text is None else lease.describe_owner(lease.parse(text))


def check_clock(target: PlannedTarget, facts: Facts) -> Iterator[Finding]:
    """Note a clock that is far from this machine's; nothing is measured by it."""
    ahead = facts.clock_ahead_s
    if abs(ahead) > CLOCK_S:
        words = (
            f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's: times in its logs are its own"
        )
        yield target.finding("clock", "note", words, "have it set by NTP")
