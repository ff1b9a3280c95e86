"""What every column of every table means: the source of docs/tables.md and of the types that `read_tables` restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ddtree_bench.metrics import definitions

Kind = Literal["text", "int", "float", "bool"]


@dataclass(frozen=True)
class Column:
    """One column: its type, its unit ("" for none) and its meaning in a sentence."""

    kind: Kind
    unit: str
    meaning: str


def _text(meaning: str) -> Column:
    return Column("text", "", meaning)


def _int(unit: str, meaning: str) -> Column:
    return Column("int", unit, meaning)


def _float(unit: str, meaning: str) -> Column:
    return Column("float", unit, meaning)


def _bool(meaning: str) -> Column:
    return Column("bool", "", meaning)


SERVER: Mapping[str, Column] = {
    "target": _text("The machine that was measured."),
    "server": _text("The launch configuration by its readable name."),
    "engine": _text("What served: `reference`, `sglang` or `other`."),
    "environment": _text(
        "Key of the environment: pins, lock, patches and plugin source; `external` for an endpoint that was up already."
    ),
    "model": _text("Target model."),
    "model_revision": _text("Its revision."),
    "drafter": _text("Drafter model; empty for AR."),
    "drafter_revision": _text("Its revision."),
    "method": _text("AR, DFLASH or DDTREE."),
    "block_size": _int("tokens", "Drafter's block, the anchor included; empty for AR."),
    "budget": _int("nodes", "Tree nodes a round, the root not counted; DDTREE only."),
    "topk_cap": _int("candidates", "Effective top-k cap a depth, min(topk_cap, budget); DDTREE only."),
    "verify_width": _int("tokens", "Rows of one target forward a request: 1, the block size, or budget + 1."),
    "tensor_parallel": _int("devices", "Tensor parallel size."),
    "expert_parallel": _int("devices", "Expert parallel size."),
    "max_running_requests": _int("requests", "Requests that the server admits at once."),
    "flags": _text("Further launch flags, canonical JSON."),
    "host_key": _text("Digest of the host as probed inside the run, with the content of the model and of the drafter."),
    "machine_key": _text("The same without the drafter: equal for all methods of a model on one machine."),
}

WORK: Mapping[str, Column] = {
    "workload": _text("Name of the workload."),
    "endpoint": _text("`chat` or `completions`."),
    "n_prompts": _int("prompts", "Prompts of the cell."),
    "prompts_sha256": _text("Digest of the prompts used, in order."),
    "max_tokens": _int("tokens", "Most output tokens of a request."),
    "temperature": _float("", "Sampling temperature; 0 is greedy."),
    "top_p": _float("", "Nucleus sampling bound sent with every request."),
    "top_k": _int("tokens", "Top-k sampling bound sent with every request."),
    "seed": _int("", "Sampling seed sent with every request."),
    "ignore_eos": _bool("Whether text ran on after its end (which inflates the accept length)."),
    "repeat_prompts": _bool("Whether prompts were used more than once."),
    "warmup": _text("Digest of the warm-up: its prompts, their number and their length."),
    "protocol": _int("", "Number of the measuring protocol."),
    "load": _text("Load point by name."),
    "load_kind": _text("`closed` (a request for each answer) or `open` (requests arrive at a rate)."),
    "concurrency": _int("requests", "Requests kept in flight (closed loop), or the most in flight (open loop)."),
    "rate": _float("requests/s", "Requests that arrive a second; empty for a closed loop."),
    "arrivals": _text("`poisson` or `constant`: how they arrive; empty for a closed loop."),
}

READ_BACK: Mapping[str, Column] = {
    "engine_version": _text("Version that the server itself reported."),
    "numerics": _text("Numerics mode that the server itself reported (`mixed` or `fp32`)."),
    "bit_exact": _bool("Whether the server's self-test found row-invariant kernels."),
    "threads": _int("threads", "Threads that the server itself reported."),
}
"""What a server says of itself once it runs: no ratio crosses a difference in one of these."""

CELL: Mapping[str, Column] = {
    "repeat": _int("", "Number of the repeat, from 1."),
    "block": _text("One uninterrupted pass over a repeat: ratios inside it are paired."),
    "start_id": _text(
        "The server start that measured it: the same for all cells of one run, and for all of an external endpoint "
        "that runs on or does not tell its starts."
    ),
    "status": _text(
        "`ok`, `failed`, or `aborted` (broken off, as at `cell_timeout_s`). Failed cells carry no metrics; neither "
        "they nor aborted ones enter a ratio."
    ),
    "aborted": _text("Why it was broken off before all requests were answered."),
    "reason": _text("Why it failed or was broken off, or why a ratio is not given."),
    "log_tail": _text("Last lines of the server's log of a failed cell."),
    "plan_key": _text("Digest of everything the number may depend on that is known before anything runs."),
    "attempt": _int("", "Number of the attempt that counts, from 1."),
    "commit": _text(
        "Commit of the repository that measured, marked when files differed from it; empty when not known."
    ),
    "started_at": _text("Start of the measurement, ISO 8601."),
    "ended_at": _text("End of the measurement, ISO 8601."),
    **READ_BACK,
    "answered_sha256": _text("Digest of the prompts whose request succeeded, in order: equal for equal work."),
    "client_place": _text("Where the load client ran: `here`, at the other end of the link, or on the `target`."),
    "link_round_trip_p50_s": _float(
        "s", "Median round trip to the host during the cell, one a second; empty where no link is in between."
    ),
    "link_round_trip_max_s": _float("s", "The longest of them."),
    "server_generation_tokens": _int("tokens", "Tokens that the server counted over the cell: counter after - before."),
    "server_verify_calls": _int("rounds", "Verify passes that the server counted over the cell."),
    "counter_mismatch": _bool(
        "Whether the tokens of all requests, as the client has them, are more than 1 % off the server's count."
    ),
    "client_healthy": _bool(
        "Whether the client's own error is below 1 % of speeds and 2 ms of other latencies; empty when not known."
    ),
    "tokenizer_sha256": _text(
        "Digest of the tokenizer.json that counted the tokens where the server did not; empty when none was given."
    ),
    "cache_not_flushed": _text("Why the prefix cache of an external endpoint was not emptied before the cell."),
    "checks_failed": _text("The checks that failed, by name, with a space between: see docs/methodology.md."),
    "not_confirmed": _text(
        "Parts of the planned launch configuration that an external endpoint says nothing of, by its names for them."
    ),
}

RUN: Mapping[str, Column] = {
    "start_status": _text("`ok` or `failed`: whether the server became ready."),
    "ready_s": _float(
        "s", "From the start of the process to the first real completion answered; empty for an external endpoint."
    ),
    "cells_ok": _int("cells", "Cells measured in this run."),
    "cells_aborted": _int("cells", "Cells of this run that were broken off."),
    "cells_failed": _int("cells", "Failed cells of this run."),
    **READ_BACK,
    "host_name": _text("Name of the host as probed."),
    "cpu_model": _text("CPU model as probed."),
    "cpu_cores": _int("cores", "Cores that the server could use."),
    "gpu_model": _text("GPU model as probed; empty without one."),
    "gpu_count": _int("devices", "GPUs as probed; empty for an external endpoint, of whose machine nothing is known."),
    "driver": _text("GPU driver as probed."),
    "kernel": _text("Kernel release as probed."),
}

SPEEDUP: Mapping[str, Column] = {
    "baseline": _text("Method of the baseline: AR or DFLASH."),
    "baseline_server": _text("The baseline's launch configuration."),
    "comparison": _text(
        "`ok`, `no_baseline`, `no_runs` (a side has no run that succeeded), `refused` (unlike cells) or `unequal_work`"
        " (other prompts were answered on one side)."
    ),
    "pairing": _text("`paired` (same repeat, workload, load and block) or `unpaired` (other blocks: Welch, wider)."),
    "n": _int("runs", "Pairs of runs; without pairs, runs of the configuration."),
    "n_baseline": _int("runs", "Runs of the baseline that the ratio stands on."),
    "n_left_out": _int("runs", "Runs of the configuration that succeeded but have no partner in their block."),
    "window": _text("Window of both throughputs: `steady`, or `full` when either side's steady window is too short."),
    "throughput_tok_s": _float("tokens/s", "Output tokens per second, mean of the runs."),
    "baseline_throughput_tok_s": _float("tokens/s", "The same of the baseline."),
    "speedup": _float("", "Ratio of the throughputs: geometric mean over repeats."),
    "speedup_low": _float("", "Lower bound of its 95 % t-interval on the log scale; empty below 3 pairs."),
    "speedup_high": _float("", "Upper bound."),
    "accept_length_factor": _float(
        "", "First factor: pooled accept length over the baseline's (1 for AR by definition)."
    ),
    "accept_length_factor_low": _float("", "Lower bound of its 95 % t-interval."),
    "accept_length_factor_high": _float("", "Upper bound."),
    "step_time_factor": _float("", "Second factor: the baseline's step or round time over the round time."),
    "step_time_factor_low": _float("", "Lower bound of its 95 % t-interval."),
    "step_time_factor_high": _float("", "Upper bound."),
    "residual_factor": _float(
        "", "Third factor: prefill, queueing and the client. The product of the three is the speed-up."
    ),
    "residual_factor_low": _float("", "Lower bound of its 95 % t-interval."),
    "residual_factor_high": _float("", "Upper bound."),
    "p_value": _float("", "Two-sided p-value of `no difference`, uncorrected."),
    "named": _bool("Whether the comparison was named before measuring; all others are exploratory."),
    "p_holm": _float("", "Holm-corrected p-value over the comparisons named beforehand."),
    "prompts_compared": _int("prompts", "Greedy answers: prompts that both AR and this configuration answered."),
    "identical_share": _float("", "Share of these whose text is the same as AR's in every common repeat."),
    "first_divergence": _int("characters", "Smallest index of a character that differs; empty when all are equal."),
    "detectable_effect": _float("", "Smallest true speed-up minus 1 that these runs' spread finds with 80 % power."),
}

BUDGET: Mapping[str, Column] = {
    "n": _int("runs", "Runs that succeeded: server starts."),
    "n_repeats": _int(
        "repeats", "Repeats that succeeded: more than `n` where several were measured on one running server."
    ),
    "n_failed": _int("runs", "Runs whose cell failed or was broken off."),
    "requests": _int("requests", "Requests sent in the runs that succeeded."),
    "requests_ok": _int("requests", "Requests of these runs that succeeded."),
    "window": _text("Window of the throughput: `steady`, or `full` when a run's steady window is too short."),
    "throughput_tok_s": _float("tokens/s", "Output tokens per second, mean of the runs."),
    "throughput_low_tok_s": _float("tokens/s", "Lower bound of its 95 % t-interval; empty below 3 runs."),
    "throughput_high_tok_s": _float("tokens/s", "Upper bound."),
    "accept_length": _float("tokens/round", "Pooled accept length, mean of the runs."),
    "accept_length_low": _float("tokens/round", "Lower bound of its 95 % t-interval."),
    "accept_length_high": _float("tokens/round", "Upper bound."),
    "accept_length_rounds": _float("tokens/round", "Accept length before the cut of the last round, mean of the runs."),
    "accept_length_rounds_low": _float("tokens/round", "Lower bound of its 95 % t-interval."),
    "accept_length_rounds_high": _float("tokens/round", "Upper bound."),
    "accept_length_macro": _float("tokens/round", "Mean over requests of their own accept length, mean of the runs."),
    "accept_length_macro_low": _float("tokens/round", "Lower bound of its 95 % t-interval."),
    "accept_length_macro_high": _float("tokens/round", "Upper bound."),
    "round_time_s": _float("s", "Decode time a round (AR: a step), mean of the runs."),
    "round_time_low_s": _float("s", "Lower bound of its 95 % t-interval."),
    "round_time_high_s": _float("s", "Upper bound."),
    "chosen_repeats": _int(
        "repeats", "Repeats for which this configuration was the fastest of its sweep in all others."
    ),
    "chosen_failed": _int(
        "repeats", "Of these, those in which it failed or did not answer all requests: they are in no score."
    ),
    "chosen_throughput_tok_s": _float(
        "tokens/s", "Throughput of the best configuration, chosen without the repeat it is scored on; geometric mean."
    ),
    "chosen_n": _int("runs", "Pairs of runs behind `chosen_over_ar`."),
    "chosen_over_ar": _float("", "The same over AR's runs of the same repeats and blocks; geometric mean of ratios."),
    "chosen_over_ar_low": _float("", "Lower bound of its 95 % t-interval on the log scale; empty below 3 pairs."),
    "chosen_over_ar_high": _float("", "Upper bound."),
}

CROSSOVER: Mapping[str, Column] = {
    "outcome": _text(
        "`crosses`; `above` or `below` (the ratio of throughputs to AR's is above or below 1 at every concurrency "
        "measured); `one_concurrency`; `no_ratio`."
    ),
    "crossing": _int("", "Number of the crossing along the curve, from 1; a curve with two has two rows."),
    "direction": _text("`falls`: the ratio falls below 1, AR overtakes; `rises`: the configuration overtakes AR."),
    "crossing_at": _float(
        "requests",
        "Concurrency at which the ratio is 1, its logarithm taken as linear in that of the concurrency between "
        "measured neighbours.",
    ),
    "crossing_low": _float(
        "requests",
        "Lower end of its interval; where nothing crosses, of the concurrencies at which a ratio of 1 is not rejected.",
    ),
    "crossing_high": _float("requests", "Upper end."),
    "low_open": _bool("Whether the lower end is only the least concurrency measured: the interval may go on below."),
    "high_open": _bool("Whether the upper end is only the greatest concurrency measured."),
    "interval": _text(
        "`t`: where the two-sided 95 % t-test over pairs of runs does not reject a ratio of 1; `bracket`: the measured "
        "neighbours, for fewer than 3 pairs and for unpaired ratios."
    ),
    "neighbour_low": _int("requests", "Measured concurrency next below the crossing."),
    "neighbour_high": _int("requests", "Measured concurrency next above it."),
    "measured_from": _int("requests", "Least concurrency with a ratio to AR."),
    "measured_to": _int("requests", "Greatest concurrency with a ratio to AR."),
    "n_concurrencies": _int("", "Concurrencies with a ratio to AR."),
    "pairing": _text("`paired` when the ratios of all concurrencies are; else `unpaired`."),
    "n": _int("runs", "Pairs of runs with a ratio at every one of these concurrencies; unpaired: the fewest runs."),
    "common_prompts": _int("prompts", "Prompts that the cells of all concurrencies have in common."),
    "accept_length_common_low": _float(
        "tokens/round", "Pooled accept length on these prompts, at the concurrency where it is least."
    ),
    "accept_length_common_high": _float(
        "tokens/round", "The same where it is greatest: equal to the least when decoding did not change with the load."
    ),
}

ACCEPTANCE: Mapping[str, Column] = {
    "depth": _int("drafts", "Depth d, from 1."),
    "probability": _float("", "Share of verify rounds in which at least d drafts were accepted."),
    "rounds": _int("rounds", "Verify rounds of the cell."),
}

METRIC: Mapping[str, Column] = {
    name: Column(*definition)
    for name, definition in {
        **definitions.CELL,
        **definitions.CLIENT,
        **definitions.SERVER_LOAD,
        **definitions.MACHINE,
    }.items()
}
REQUEST: Mapping[str, Column] = {name: Column(*definition) for name, definition in definitions.REQUEST.items()}

DETAIL_KEY = ("target", "server", "workload", "load", "repeat")
"""Columns that name a cell in the tables with several rows a cell; `plan_key` joins them to `cells`."""

ALONG = ("n_prompts", "prompts_sha256", "load", "load_kind", "concurrency", "rate", "arrivals")
"""Columns that change along a curve over the load, or say which load it is: a cell at a higher concurrency may hold
more prompts.
"""

_DETAIL = {name: {**SERVER, **WORK, **CELL}[name] for name in (*DETAIL_KEY, "plan_key")}

TABLES: Mapping[str, Mapping[str, Column]] = {
    "cells": {**SERVER, **WORK, **CELL, **METRIC},
    "runs": {**SERVER, **{k: CELL[k] for k in ("repeat", "block", "start_id", "started_at", "ended_at")}, **RUN},
    "speedup": {**SERVER, **WORK, **SPEEDUP, "reason": CELL["reason"]},
    "acceptance": {**_DETAIL, **ACCEPTANCE},
    "budget": {**SERVER, **WORK, **BUDGET},
    "crossovers": {
        **SERVER,
        **{name: column for name, column in WORK.items() if name not in ALONG},
        **CROSSOVER,
        "reason": CELL["reason"],
    },
    "requests": {**_DETAIL, **REQUEST},
}

ABOUT: Mapping[str, str] = {
    "cells": "One row a cell (server x workload x load x repeat), failed ones included.",
    "runs": "One row a server start, the unit of the statistics: a run, or all repeats on an endpoint that ran on.",
    "speedup": "One row a configuration and baseline: the ratio of throughputs and the factors whose product it is.",
    "acceptance": "One row a cell and depth: how deep drafts were accepted.",
    "budget": "One row a configuration: means over its runs, and how the best of a sweep does in repeats left out.",
    "crossovers": "Closed loops: one row a configuration and crossing: the concurrency at which AR overtakes, if any.",
    "requests": "One row a request, failed ones included.",
}

ORDER = (
    "target",
    "engine",
    "model",
    "workload",
    "load_kind",
    "rate",
    "concurrency",
    "load",
    "method",
    "block_size",
    "budget",
    "topk_cap",
    "server",
    "flags",
    "host_key",
    "repeat",
    "start_id",
    "baseline",
    "crossing",
    "plan_key",
    "index",
    "depth",
)
"""Row order of every table, by the columns that it has."""


def document() -> str:
    """Return docs/tables.md: what each table holds and what each of its columns means."""
    parts = [
        "# Tables",
        "",
        "Made by `python -m ddtree_bench generate`; do not edit.",
        "",
        'CSV, UTF-8, one unit a column, empty for "not available". Intervals are two-sided 95 % t-intervals over runs',
        "(fresh server starts), on the log scale for ratios; there is none below 3 runs. Repeats on one running",
        "server, as of an external endpoint, count as one run.",
    ]
    for table, known in TABLES.items():
        parts += ["", f"## {table}", "", ABOUT[table], "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        parts += [f"| `{name}` | {c.kind} | {c.unit} | {c.meaning} |" for name, c in known.items()]
    return "\n".join(parts) + "\n"
