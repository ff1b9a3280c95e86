"""What each key of metrics.json is: the page docs/metrics-json.md is made from this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import getdoc

from ddtree_bench.load.requests_table import STATUSES
from ddtree_bench.metrics import definitions
from ddtree_bench.metrics.checks import CHECKS
from ddtree_bench.metrics.document import FROM_INTENDED, LATENCIES, NAMES
from ddtree_bench.servers.observation_names import TOTALS

Key = tuple[str, str, str]
"""Type, unit and meaning."""

TOP: dict[str, Key] = {
    "format": ("int", "", "Form of this file: raised when a key changes its meaning."),
    "status": ("text", "", "`ok`; `partial`: a request was not ok or not sent; `failed`: none was ok."),
    "reason": ("text", "", "Why the status is not `ok`."),
    "load": ("object", "", "The load asked for: `concurrency`, `kind`, `rate` (requests/s) and `arrivals`."),
    "method": ("text", "", "AR, DFLASH or DDTREE, as it was given."),
    "slos": ("object", "s", "The objectives of `goodput` by name; `tpot_s` in s/token."),
}

PLANNED: dict[str, Key] = {
    "requests_planned": ("int", "requests", "Requests that were to be sent."),
    "requests_not_sent": ("int", "requests", "Of these, those that were not."),
}

ACCEPTANCE: dict[str, Key] = {
    "acceptance_by_depth": ("list", "", "P(at least d drafts of a round are accepted) for d = 1, 2, ..."),
    "acceptance_rounds": ("int", "rounds", "The rounds that these stand on."),
}

REQUESTS: Mapping[str, Key] = {status: definitions.CELL[f"requests_{status}"] for status in STATUSES}

_SPREAD = "`p50`, `p99` and `max`"

CLIENT: Mapping[str, Key] = {
    "wall_s": ("float", "s", "From the first request to the end of the last answer."),
    "cpu_s": ("float", "s", "CPU time of the client's process in that time."),
    "events_read": ("int", "reads", "Reads of all answers."),
    "reader_cpu_s": ("float", "s", "CPU time of the thread that reads answers."),
    "reader_wait_s": ("float", "s", "Time that it was ready and had no CPU."),
    "reader_slices": ("int", "", "How often it got a CPU."),
    "run_queue_wait_s": ("float", "s", "Time that the client's threads were ready and had no CPU, summed."),
    "kernel_stamps": ("bool", "", "Whether the kernel told when most reads' bytes had come."),
    "clock_stepped": ("bool", "", "Whether the clock of these stamps was set meanwhile, so that they are not used."),
    "connections_preopened": ("int", "", "Connections that were open before the first request."),
    "connection_retries": ("int", "", "Attempts to open them after the first."),
    "server_sample_errors": ("int", "samples", "Samples of the server's load that failed."),
    "lags_known": ("float", "", "Share of the events of which it is known how long they lay unread."),
    "event_lag_s": ("object", "s", f"How long they did: {_SPREAD}."),
    "send_late_s": ("object", "s", f"How late the client sent requests: {_SPREAD}."),
    "own_error": (
        "object",
        "s, or a share",
        "What the client itself adds to each statistic, by its name in docs/tables.md (cells): `value`, and the "
        "`limit` that it may reach. Shares for throughputs and speeds of a user.",
    ),
}

SERVER: Mapping[str, Key] = {
    **definitions.SERVER_LOAD,
    "counters": ("object", "", "How much the server's own counters grew, by the names below."),
    "missing": ("object", "", "The counters that are not known, and why."),
    "notes": ("list", "", "What is to be known of what the server tells, such as what its release leaves out."),
}

COUNTERS: Mapping[str, Key] = {
    **{name: ("float", "", f"{meaning[0].upper()}{meaning[1:]}.") for name, meaning in TOTALS.items()},
    "decode_graph_share": ("float", "", "Share of the decode steps that ran in a CUDA graph."),
}


def values() -> dict[str, Key]:
    """Return the keys that hold the metrics of the cell, those of docs/tables.md under the names of this file."""
    latencies = (*LATENCIES, *FROM_INTENDED)
    columns = {f"{name}_{one}_s" for name in latencies for one in ("mean", "p50", "p90", "p99")}
    found: dict[str, Key] = {
        NAMES.get(name, name): key
        for name, key in definitions.CELL.items()
        if name not in columns and name != "requests" and name.removeprefix("requests_") not in STATUSES
    }
    return found | {f"{name}_s": _latency(name) for name in latencies}


def _latency(name: str) -> Key:
    meaning = definitions.CELL[f"{name}_mean_s"][2].removesuffix(".").replace(", mean of ", ", over ")
    return "object", "s/token" if name in ("tpot", "itl") else "s", f"{meaning}: `mean`, `p50`, `p90`, `p99`."


def page() -> str:
    """Return docs/metrics-json.md."""
    checks = {name: getdoc(judge) or "" for name, judge in CHECKS.items()}
    checks["client_healthy"] = "The client's own share of every statistic is within its limit (`client.own_error`)."
    rows = (f"| `{name}` | {_cell(what)} |" for name, what in checks.items())
    return "\n".join([*_HEAD, *_sections(), *_CHECKS_HEAD, *rows, ""])


_HEAD = (
    "# metrics.json",
    "",
    "Made by `python -m ddtree_bench generate`; do not edit.",
    "",
    "What `measure --out` and `metrics` write: everything that is computed from a measurement's raw record. A value",
    "that cannot be known (NA below) is null, and a check or `server.missing` says why. Percentiles are nearest rank:",
    "p90 needs 36 values and p99 needs 368. `requests.parquet` has it for each request: docs/tables.md, requests.",
)

_CHECKS_HEAD = (
    "",
    "## `checks`",
    "",
    "A list of `{name, ok, detail}`. `ok` is null where it cannot be judged; `detail` says what it rests on, or why.",
    "",
    "| name | what holds |",
    "|---|---|",
)


def _sections() -> Iterator[str]:
    sections = {
        "Top level": {**TOP, **PLANNED, **values(), **ACCEPTANCE},
        "`requests`": REQUESTS,
        "`client`": CLIENT,
        "`server`": SERVER,
        "`server.counters`": COUNTERS,
    }
    for title, keys in sections.items():
        yield from ("", f"## {title}", "", "| key | type | unit | meaning |", "|---|---|---|---|")
        yield from (
            f"| `{name}` | {kind} | {unit} | {_cell(meaning)} |" for name, (kind, unit, meaning) in keys.items()
        )


def _cell(text: str) -> str:
    """The first paragraph of a text, in one line."""
    return " ".join(text.split("\n\n")[0].split())
