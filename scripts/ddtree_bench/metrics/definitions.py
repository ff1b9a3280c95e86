"""What each metric is: (type, unit, meaning) by column, for the documentation of the tables. NA where not known.

t0 is the moment a request was sent, e1 ... em the moments of its token-bearing events, N its output tokens, n1 those of
its first event. Prefills are the tokens that no round committed: 1, and one more for each retraction that the server
tells of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Definition = tuple[Literal["text", "int", "float", "bool"], str, str]


def _latency(name: str, what: str, of: str) -> dict[str, Definition]:
    return {
        f"{name}_mean_s": ("float", "s", f"{what}, mean of {of}."),
        f"{name}_p50_s": ("float", "s", f"{what}, median of {of} (nearest rank)."),
        f"{name}_p90_s": ("float", "s", f"{what}, 90th percentile of {of}; NA below 36 values."),
        f"{name}_p99_s": ("float", "s", f"{what}, 99th percentile of {of}; NA below 368 values."),
    }


REQUEST: Mapping[str, Definition] = {
    "index": ("int", "", "Place of the request in the cell's ordered prompts, from 0."),
    "prompt_id": ("text", "", "The prompt by its id in the prompt file."),
    "category": ("text", "", "The prompt's category."),
    "prompt_sha256": ("text", "", "Digest of the prompt's text."),
    "worker": ("int", "", "Which of the client's connections sent it, from 0."),
    "max_tokens": ("int", "tokens", "Most output tokens asked for."),
    "retries": ("int", "", "Attempts to connect after the first; a request that was sent is never sent again."),
    "status": ("text", "", "`ok`, or the kind of failure; only ok requests enter throughputs and latencies."),
    "error": ("text", "", "What went wrong."),
    "http_status": ("int", "", "HTTP status; NA when there was no answer."),
    "finish_reason": ("text", "", "Why the answer ended, in the server's word."),
    "prompt_tokens": ("int", "tokens", "Tokens of the prompt, by the server."),
    "cached_prompt_tokens": ("int", "tokens", "Of these, those served from the prefix cache."),
    "output_tokens": ("int", "tokens", "N: completion tokens; for a failed request, those the server had told of."),
    "token_source": (
        "text",
        "",
        "Where N is from: `usage`, or `tokenizer` when the server told of none at the end; NA without either.",
    ),
    "n1": ("int", "tokens", "Tokens carried by the first token-bearing event."),
    "n1_source": (
        "text",
        "",
        "Where the tokens of each event are from: `usage` (continuous), `tokenizer`, or `text_share` (N by length).",
    ),
    "token_events": ("int", "events", "Token-bearing events, m."),
    "ttft_s": ("float", "s", "Time to first token: e1 - t0."),
    "e2e_s": ("float", "s", "From t0 to the last token-bearing event or the finish_reason, whichever is later."),
    "tpot_s": (
        "float",
        "s/token",
        "Time per output token: (E2E - TTFT) / (N - n1); NA when one event held all.",
    ),
    "ttft_from_intended_s": ("float", "s", "TTFT from the scheduled start; open-loop load only."),
    "e2e_from_intended_s": ("float", "s", "E2E from the scheduled start; open-loop load only."),
    "user_speed_tok_s": ("float", "tokens/s", "N / E2E."),
    **_latency("itl", "Inter-token latency, each gap divided over the tokens it brought", "the request's tokens"),
    **_latency("icl", "Inter-chunk latency, the gap between events", "the request's gaps"),
    "rounds": ("int", "rounds", "Verify passes of the target."),
    "accepted_drafts": ("int", "tokens", "Accepted drafts over all rounds, before the cut of the last."),
    "proposed_drafts": ("int", "tokens", "Proposed drafts over all rounds."),
    "accept_length": ("float", "tokens/round", "(N - prefills) / rounds: the cut of the last round included."),
    "accept_length_rounds": ("float", "tokens/round", "Mean tokens committed a round, before the cut of the last."),
    "tree_nodes": ("int", "nodes", "Tree nodes over all rounds, roots not counted."),
    "tree_branching_nodes": ("int", "nodes", "Of these and the roots, those with two children or more."),
    "tree_max_depth": ("int", "tokens", "Greatest depth of a tree."),
    "identity_holds": (
        "bool",
        "",
        "Whether N = prefills + rounds + accepted drafts, up to the last round's cut, by what the answer itself tells.",
    ),
    "text_sha256": ("text", "", "Digest of the answer's text, reasoning included."),
}

CELL: Mapping[str, Definition] = {
    "requests": ("int", "requests", "Requests sent."),
    "requests_ok": ("int", "requests", "Requests that succeeded."),
    "requests_http_error": ("int", "requests", "Answered with an HTTP status other than 200."),
    "requests_error_event": (
        "int",
        "requests",
        "Begun with 200, then an error object or finish_reason `abort` or `error`.",
    ),
    "requests_truncated": ("int", "requests", "Stream ended without finish_reason and without [DONE]."),
    "requests_timeout": ("int", "requests", "A time limit of the client was reached."),
    "requests_connect_error": ("int", "requests", "No connection, or closed before any answer."),
    "requests_empty": ("int", "requests", "Answer ended without a token-bearing event."),
    "finished_by_length": ("int", "requests", "Ok requests that ended at max_tokens."),
    "finished_by_stop": ("int", "requests", "Ok requests that ended by themselves."),
    "finished_by_other": ("int", "requests", "Ok requests that ended with another finish_reason, or without one."),
    "output_tokens": ("int", "tokens", "Output tokens of ok requests; NA when one of them is unknown."),
    "output_tokens_all_requests": (
        "int",
        "tokens",
        "The same of all requests, failed ones too: for the server's count.",
    ),
    "output_length_mean": ("float", "tokens", "Output tokens of an ok request, mean."),
    "output_length_min": ("int", "tokens", "The shortest."),
    "output_length_max": ("int", "tokens", "The longest."),
    "token_source": (
        "text",
        "",
        "Where the output tokens are from: `usage`, `tokenizer` or `mixed`; NA when those of one request are unknown.",
    ),
    "n_source": (
        "text",
        "",
        "Where the tokens of each event are from: `usage`, `tokenizer`, `text_share` or `mixed`.",
    ),
    "prompt_tokens": ("int", "tokens", "Prompt tokens of ok requests; part of no throughput."),
    "cached_prompt_tokens": ("int", "tokens", "Of these, those served from the prefix cache."),
    "texts_sha256": ("text", "", "Digest of all answers' texts in order; NA unless every request succeeded."),
    "wall_s": ("float", "s", "From the first t0 to the last em of ok requests."),
    "requests_per_s": ("float", "requests/s", "Ok requests / wall."),
    "throughput_full_tok_s": ("float", "tokens/s", "Output tokens of ok requests / wall."),
    "throughput_steady_tok_s": (
        "float",
        "tokens/s",
        "Output tokens inside the steady window / its length. Closed loop: from the first to the last moment with all "
        "requests in flight, failed ones among them. Open loop: from the first start + the time within which 90 % of "
        "the requests ended, to the last scheduled arrival.",
    ),
    "throughput_window": (
        "text",
        "",
        "Which of both figures use: `steady` when there is one and it holds half of the tokens, else `full`.",
    ),
    "steady_window_s": (
        "float",
        "s",
        "Length of the steady window; NA when there is none: the concurrency was never reached, or an open loop was "
        "over before it had warmed up.",
    ),
    "steady_token_share": ("float", "", "Share of the output tokens inside the steady window."),
    "peak_throughput_tok_s": ("float", "tokens/s", "Most output tokens in any 1 s; NA below 3 s of wall."),
    "user_speed_tok_s": ("float", "tokens/s", "Mean of N / E2E over ok requests."),
    "slo_met": ("int", "requests", "Ok requests that meet every objective; NA without an objective."),
    "goodput_req_s": (
        "float",
        "requests/s",
        "Ok requests that meet every objective / wall; TTFT and E2E from the scheduled start in an open loop.",
    ),
    "mean_in_flight": ("float", "requests", "Requests in flight, mean from the first sent to the last ended."),
    "most_in_flight": ("int", "requests", "Most requests in flight at once."),
    "arrivals_per_s": ("float", "requests/s", "Rate of the scheduled arrivals; open loop only."),
    **_latency("ttft", "Time to first token", "the ok requests"),
    **_latency("e2e", "Time to the last event", "the ok requests"),
    **_latency("ttft_from_intended", "Time to first token from the scheduled start", "the ok requests (open loop)"),
    **_latency("e2e_from_intended", "Time to the last event from the scheduled start", "the ok requests (open loop)"),
    **_latency("tpot", "Time per output token after the first event", "the ok requests that have one"),
    **_latency("itl", "Inter-token latency, each gap divided over the tokens it brought", "all tokens"),
    **_latency("icl", "Inter-chunk latency, the gap between events", "all gaps"),
    "rounds": ("int", "rounds", "Verify passes of the target over the ok requests."),
    "accepted_drafts": ("int", "tokens", "Accepted drafts over all rounds, before the cut of each request's last."),
    "proposed_drafts": ("int", "tokens", "Proposed drafts over all rounds."),
    "accept_length": (
        "float",
        "tokens/round",
        "Pooled: sum(N - prefills) / sum(rounds), cuts of last rounds included. NA when there were retractions, "
        "maybe of failed requests.",
    ),
    "accept_length_rounds": ("float", "tokens/round", "Mean over rounds, before cuts: the one to compare budgets by."),
    "accept_length_macro": ("float", "tokens/round", "Mean over requests of their own mean over rounds."),
    "acceptance_rate": ("float", "", "Accepted / proposed drafts. Falls with the budget by construction: never ranks."),
    "identity_broken": (
        "int",
        "requests",
        "Requests whose N is not prefills + rounds + accepted drafts, up to the last round's cut. As many prefills may "
        "be missing in all together as the server counted retractions that no answer tells of.",
    ),
    "tree_nodes_per_round": (
        "float",
        "nodes/round",
        "Tree nodes a round, the root not counted; by the server's counters over the cell where no answer tells, as "
        "are the branching nodes.",
    ),
    "tree_branching_nodes_per_round": (
        "float",
        "nodes/round",
        "Nodes with two children or more a round, root included.",
    ),
    "tree_max_depth": ("int", "tokens", "Greatest depth of a tree."),
    "tree_is_chain": ("bool", "", "Whether no tree of the cell branched: DDTREE in name only."),
    "decode_s_per_token": (
        "float",
        "s/token",
        "Pooled: sum of E2E - TTFT / sum of N - n1, of the answers that did not come in one piece.",
    ),
    "round_time_s": (
        "float",
        "s",
        "Decode time a round (AR: a step): decode_s_per_token x accept_length (x 1 for AR, and where the server of an "
        "unknown method says that there were no rounds).",
    ),
}

CLIENT: Mapping[str, Definition] = {
    "client_event_lag_p99_s": (
        "float",
        "s",
        "How long events lay unread in the client's kernel, 99th percentile; NA where the kernel did not stamp them.",
    ),
    "client_send_late_p99_s": (
        "float",
        "s",
        "How late the client sent requests after the answer before (open loop: their scheduled start), sending "
        "included, 99th percentile.",
    ),
}

SERVER_LOAD: Mapping[str, Definition] = {
    "server_running_mean": ("float", "requests", "Requests that ran on the server, by its own count, mean of samples."),
    "server_running_max": ("int", "requests", "The most in any sample: below the concurrency, the rest only queued."),
    "server_queued_mean": (
        "float",
        "requests",
        "Requests that waited on the server, by its own count, mean of samples.",
    ),
}

MACHINE: Mapping[str, Definition] = {
    "gpus_used": (
        "int",
        "devices",
        "GPUs of the server: those with 1 GiB or more of memory in use in the measured time. The rows on GPUs are of "
        "these, but where they say `machine`.",
    ),
    "energy_j": (
        "float",
        "J",
        "Energy of these GPUs from the first t0 to the end of the last answer: the difference of their counters.",
    ),
    "energy_j_per_token": ("float", "J/token", "The same / output tokens of ok requests."),
    "gpu_power_w_mean": ("float", "W", "Power of these together in that time, mean of samples, one a second."),
    "gpu_power_w_idle": (
        "float",
        "W",
        "What these drew together before the server was started, as the host was probed for its run.",
    ),
    "machine_gpu_energy_j": ("float", "J", "Energy of all GPUs of the machine in that time, used or not."),
    "machine_gpu_power_w_mean": ("float", "W", "Power of all GPUs of the machine together, mean of samples."),
    "gpu_utilization_percent_mean": ("float", "%", "Share of the time in which a GPU was in use, mean over GPUs."),
    "sm_clock_mhz_min": ("float", "MHz", "Lowest SM clock of any of them in any sample."),
    "sm_clock_mhz_median": ("float", "MHz", "Median over them of the median SM clock of each."),
    "throttled_share": (
        "float",
        "",
        "Share of the samples in which power, heat or a slowdown of the hardware held down the clocks of any of them; "
        "idleness and clocks that were set do not count.",
    ),
    "gpu_temperature_c_max": ("float", "degrees Celsius", "Highest temperature of any of them."),
    "cpu_utilization_percent_mean": ("float", "%", "Share of the time in which the machine's processors were in use."),
    "cpu_energy_j": ("float", "J", "Energy of its processors by their RAPL counters, over the same time."),
    "telemetry_missing": ("text", "", "Why some of these are not known."),
}
