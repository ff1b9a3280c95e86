"""Whether a cell's numbers hold together: each check compares two things that must agree, and says what it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ddtree_bench.metrics.cells import Scalars
from ddtree_bench.metrics.throughput import PEAK_LEAST_WALL_S, STEADY_LEAST_SHARE, in_flight_at
from ddtree_bench.metrics.tokens import Row
from ddtree_bench.plan import Load

TOKENS_TOLERANCE = 0.01
"""Most that the client's tokens may differ from the server's, as a share of the server's."""

LOAD_TOLERANCE = 0.05
"""Most that the requests on the server may differ from those in flight at the client, as a share of these."""

LEAST_SAMPLES = 3
"""Samples of the server's load from which it can be judged."""

CACHED_SHARE = 0.5
"""A prompt of which more than this came from the cache had been seen before: shared templates are shorter."""


@dataclass(frozen=True)
class Check:
    """A check by name: whether it holds (None: it cannot be judged) and what it rests on, or why it cannot."""

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class Checked:
    """What the checks look at.

    `rows` are the raw rows of the cell, `cell` its metrics, `samples` those of the server's load, `counters` the
    differences of the server's counters over the cell by name, `missing` why others are not there, and `planned` the
    number of requests that were to be sent.
    """

    rows: Sequence[Row]
    cell: Scalars
    load: Load
    method: str | None
    samples: pd.DataFrame
    counters: Mapping[str, float]
    missing: Mapping[str, str]
    planned: int


def checks(of: Checked) -> list[Check]:
    """Return every check of a cell but that of the client's own health, which `client_health` makes."""
    return [Check(name, *judge(of)) for name, judge in _CHECKS.items()]


Verdict = tuple[bool | None, str]


def _complete(of: Checked) -> Verdict:
    """Every request that was planned was sent and succeeded."""
    ok = int(of.cell["requests_ok"] or 0)
    return ok == of.planned, f"{ok} of {of.planned} planned requests succeeded, {len(of.rows)} were sent"


def _tokens_known(of: Checked) -> Verdict:
    """The output tokens of every ok request are known."""
    if not of.cell["requests_ok"]:
        return None, "no request succeeded"
    if of.cell["output_tokens"] is None:
        return False, "the server sent no usage at the end of some answers; give a tokenizer to count their tokens"
    return True, f"counted by {of.cell['token_source']}; shared over events by {of.cell['n_source']}"


def _tokens_agree(of: Checked) -> Verdict:
    """The client's tokens, of failed requests too, against the difference of the server's counter."""
    server = of.counters.get("generation_tokens_total")
    client = of.cell["output_tokens_all_requests"]
    if server is None:
        return None, f"the server's count is not known: {of.missing.get('generation_tokens_total', 'it tells of none')}"
    if client is None:
        return None, "the client's count is not known for every request"
    detail = f"client {client}, server {server:.0f} tokens (failed requests included)"
    return abs(float(client) - server) <= TOKENS_TOLERANCE * server, detail


def _delivered_load(of: Checked) -> Verdict:
    """The requests on the server (running and queued) against those in flight at the client, at the same moments.

    False when they are further apart than LOAD_TOLERANCE and than twice the standard error of the samples' mean.
    """
    found = _samples(of)
    if len(found) < LEAST_SAMPLES:
        return None, f"{len(found)} samples of the server's load; {LEAST_SAMPLES} are needed"
    server = (found["running"] + found["queued"]).to_numpy(dtype=float)
    client = in_flight_at(of.rows, found["time"].to_numpy(dtype=float))
    apart = server - client
    off, allowed = abs(float(apart.mean())), LOAD_TOLERANCE * float(client.mean())
    noise = 2 * float(apart.std(ddof=1)) / len(apart) ** 0.5
    detail = f"in flight {client.mean():.2f}, on the server {server.mean():.2f}, mean of {len(found)} samples"
    if off <= allowed:
        return True, detail
    return (False, detail) if off - noise > allowed else (None, f"{detail}: too uncertain to tell (± {noise:.2f})")


def _admitted(of: Checked) -> Verdict:
    """As many requests as the load asks for ran at once on the server, and did not only wait in its queue."""
    if of.load.kind == "open":
        return None, "in an open loop requests may wait on the server"
    found = _samples(of)
    if len(found) < LEAST_SAMPLES:
        return None, f"{len(found)} samples of the server's load; {LEAST_SAMPLES} are needed"
    running, queued = int(found["running"].max()), float(found["queued"].mean())
    wanted = min(of.load.concurrency, int(of.cell["most_in_flight"] or 0))
    detail = f"at most {running} of {wanted} ran at once, {queued:.1f} waited on average"
    if running >= (1 - LOAD_TOLERANCE) * wanted:
        return True, detail
    return (False, detail) if queued > 0 else (None, f"{detail}: no sample may have met them all")


def _samples(of: Checked) -> pd.DataFrame:
    """The samples with both counts that were taken while requests were in flight."""
    if not of.rows:
        return of.samples.iloc[:0]
    begun, ended = min(row["t_send"] for row in of.rows), max(row["t_end"] for row in of.rows)
    known = of.samples.dropna(subset=["running", "queued"])
    return known[known["time"].between(begun, ended)]


def _steady_window(of: Checked) -> Verdict:
    """The steady window is there and holds half of the tokens, so that figures use it."""
    if of.cell["throughput_window"] is None:
        return None, "there is no throughput"
    share = of.cell["steady_token_share"]
    if share is not None:
        least = f"{STEADY_LEAST_SHARE:.0%} are needed"
        return float(share) >= STEADY_LEAST_SHARE, f"it holds {float(share):.0%} of the tokens; {least}"
    if of.load.kind == "open":
        return False, "the load was over before it had warmed up; send more requests"
    if of.cell["requests_ok"] != of.cell["requests"]:
        return False, "there is none in a closed loop of which a request failed"
    most = of.cell["most_in_flight"]
    return False, f"at most {most} of {of.load.concurrency} requests were in flight; send more requests"


def _peak(of: Checked) -> Verdict:
    """The peak is no less than tokens / (floor(wall) + 1)."""
    peak, wall, tokens = (of.cell[name] for name in ("peak_throughput_tok_s", "wall_s", "output_tokens"))
    if peak is None or wall is None or tokens is None:
        return None, f"there is no peak: the tokens are unknown, or the cell was below {PEAK_LEAST_WALL_S:g} s"
    least = float(tokens) / (int(wall) + 1)
    return float(peak) >= least, f"peak {float(peak):.1f} tokens/s, at least {least:.1f} by the mean"


def _identity(of: Checked) -> Verdict:
    """N = prefills + rounds + accepted drafts in every ok request, up to the cut of the last round."""
    broken = of.cell["identity_broken"]
    if of.method == "AR" or of.cell["rounds"] == 0:
        return None, "there were no rounds"
    if broken is None:
        return None, "the server tells of no rounds, or not of those of every request"
    return broken == 0, f"N is not prefills + rounds + accepted drafts in {broken} of {of.cell['requests_ok']} requests"


def _tree_branches(of: Checked) -> Verdict:
    """The trees of a DDTREE cell branch: otherwise they were chains."""
    if of.method not in (None, "DDTREE"):
        return None, f"{of.method} has no trees"
    chain = of.cell["tree_is_chain"]
    if chain is None:
        return None, "the server tells of no trees"
    nodes, branching = of.cell["tree_nodes_per_round"], of.cell["tree_branching_nodes_per_round"]
    return not chain, f"{_shown(nodes)} nodes a round, {_shown(branching)} with two children or more"


def _shown(value: Any) -> str:
    return "an unknown number of" if value is None else f"{float(value):.2f}"


def _prompts_repeated(of: Checked) -> Verdict:
    """No prompt was sent twice."""
    repeated = len(of.rows) - len({row["prompt_sha256"] for row in of.rows})
    return repeated == 0, f"{repeated} of {len(of.rows)} requests had a prompt that was sent before"


def _cached_prompts(of: Checked) -> Verdict:
    """No answer began from a cache that held most of its prompt."""
    ok = [row for row in of.rows if row["status"] == "ok"]
    told = [row for row in ok if not pd.isna(row["cached_prompt_tokens"]) and not pd.isna(row["prompt_tokens"])]
    if not ok or len(told) < len(ok):
        return None, f"{len(told)} of {len(ok)} answers tell of cached prompt tokens"
    hits = sum(row["cached_prompt_tokens"] > CACHED_SHARE * row["prompt_tokens"] for row in told)
    cached, prompts = (sum(int(row[name]) for row in told) for name in ("cached_prompt_tokens", "prompt_tokens"))
    return hits == 0, f"most of the prompt was cached in {hits} of {len(ok)} requests; {cached} of {prompts} tokens"


def _lengths(of: Checked) -> Verdict:
    """No answer is longer than max_tokens, and one that ended by length has just as many."""
    ok = [row for row in of.rows if row["status"] == "ok"]
    if not ok or of.cell["token_source"] != "usage":
        return None, "the lengths of the answers are not known by usage"
    lengths = np.array([int(row["completion_tokens"]) for row in ok])
    most = np.array([int(row["max_tokens"]) for row in ok])
    by_length = np.array([row["finish_reason"] == "length" for row in ok])
    longer, cut = int((lengths > most).sum()), int((by_length & (lengths < most)).sum())
    detail = f"{longer} of {len(ok)} answers are longer than max_tokens, {cut} ended by length before it"
    return longer + cut == 0, detail


_CHECKS: Mapping[str, Callable[[Checked], Verdict]] = {
    "complete": _complete,
    "tokens_known": _tokens_known,
    "tokens_agree": _tokens_agree,
    "delivered_load": _delivered_load,
    "admitted": _admitted,
    "steady_window": _steady_window,
    "peak": _peak,
    "identity": _identity,
    "tree_branches": _tree_branches,
    "prompts_repeated": _prompts_repeated,
    "cached_prompts": _cached_prompts,
    "lengths": _lengths,
}
