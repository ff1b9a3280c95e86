"""What a unit wrote, read from the journal of its host: all of its last start, once, by cursor."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddtree_bench.targets.launcher import CommandResult, TargetError

AsOwner = Callable[..., CommandResult]
"""as_owner(argv, *, stdin="") runs a command on the host as who may read the unit's messages."""

PAGE = 10_000
"""Messages that one command fetches: a few MB."""

PAGED = 'count=$1; shift; { journalctl "$@"; echo "status $?" >&2; } | head -n "$count"'
"""The first messages of a query. Its status comes last on stderr, since the pipeline has that of head."""

GOOD = frozenset({"status 0", f"status {128 + 13}"})
"""How a query ends that found all, or was cut off after a page (SIGPIPE)."""

LINE_ENDS: Mapping[str | None, bytes] = {"line-max": b"", "pid-change": b"", "eof": b"", "nul": b"\0"}
"""What followed a message, by its _LINE_BREAK; a line break after those that have none."""

FORK_US = 50_000
"""By how much a process may be ahead of the time that systemd notes for its start."""

LAG_S = 0.5
"""How long a message may be on its way into the journal."""

PROBE_S = 5.0
SETTLED_S = 0.5
POLL_S = 0.1


def refusal(as_owner: AsOwner) -> str | None:
    """Why this login cannot read from the journal what it writes there; None when it can."""
    mark = f"ddtree-bench-{uuid.uuid4().hex}"
    written = as_owner(["systemd-cat", f"--identifier={mark}"], stdin="a check of ddtree-bench: can it read this?\n")
    if written.exit_code != 0:
        return written.stderr.strip()
    deadline = time.monotonic() + PROBE_S
    while not (found := as_owner(["journalctl", "--quiet", "--output=cat", f"--identifier={mark}"])).stdout:
        if found.exit_code != 0 or time.monotonic() > deadline:
            return found.stderr.strip() or "its messages are not shown to it"
        time.sleep(POLL_S)
    return None


def matches(identifier: str) -> list[str]:
    """The matches of journalctl for what a unit's processes write; `identifier` is the unit's SyslogIdentifier=."""
    # What systemd itself says of the unit comes over another transport.
    return [f"SYSLOG_IDENTIFIER={identifier}", "_TRANSPORT=stdout"]


def beginning(as_owner: AsOwner, identifier: str, started_us: int) -> str | None:
    """The cursor from which `read` gives all that the last start of a unit wrote; None when it has written nothing yet.

    A unit's messages are known by their stream, the connection of its stdout and stderr to journald: it alone is told
    of each one. Whose a message is journald finds out too late where the process has ended meanwhile. `started_us` is
    when the unit was started, or 0.
    """
    options = ["--lines=1", "--output-fields=_STREAM_ID"]
    for entry in _query(as_owner, [*options, *matches(identifier)]):
        if int(entry["__MONOTONIC_TIMESTAMP"]) >= started_us - FORK_US:
            return f"{entry['_STREAM_ID']} "
    return None


def read(as_owner: AsOwner, cursor: str) -> tuple[str, str]:
    """Return what a unit has written after a cursor, and the cursor after that.

    Bytes that are no UTF-8 are replaced. Raises TargetError when the journal cannot be read.
    """
    stream, _, after = cursor.partition(" ")
    text = b""
    while True:
        page = _page(as_owner, stream, after)
        text += b"".join(_message(entry) for entry in page)
        after = page[-1]["__CURSOR"] if page else after
        if len(page) < PAGE:
            return text.decode(errors="replace"), f"{stream} {after}"


def read_all(as_owner: AsOwner, cursor: str) -> tuple[str, str]:
    """Read as `read` does, of a unit that has ended, until nothing more of it comes into the journal."""
    # For root alone: journald then first stores what is still in its queues.
    as_owner(["journalctl", "--sync"])
    text, cursor = read(as_owner, cursor)
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < SETTLED_S:
        time.sleep(POLL_S)
        more, cursor = read(as_owner, cursor)
        if more:
            text, quiet_since = text + more, time.monotonic()
    return text, cursor


def _page(as_owner: AsOwner, stream: str, after: str) -> list[dict[str, Any]]:
    options = ["--output-fields=MESSAGE,_LINE_BREAK"]
    if after:
        options.append(f"--after-cursor={after}")
    return _query(as_owner, [*options, f"_STREAM_ID={stream}"])


def _query(as_owner: AsOwner, options: Sequence[str]) -> list[dict[str, Any]]:
    """The first page of the messages that journalctl gives for its options."""
    result = as_owner(["sh", "-c", PAGED, "sh", str(PAGE), "--quiet", "--all", "--output=json", *options])
    said, _, status = result.stderr.strip().rpartition("\n")
    if status not in GOOD:
        raise TargetError(f"the journal cannot be read: {said[-500:] or result.stderr.strip()[-500:]}")
    # Not by splitlines: a message may hold other line separators.
    return [json.loads(line) for line in result.stdout.split("\n") if line]


def _message(entry: Mapping[str, Any]) -> bytes:
    message = entry["MESSAGE"]
    # Text that is no UTF-8 comes as a list of bytes.
    content = message.encode() if isinstance(message, str) else bytes(message)
    return content + LINE_ENDS.get(entry.get("_LINE_BREAK"), b"\n")
