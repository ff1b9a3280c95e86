"""Whether a cell's numbers hold together: each check compares two things that must agree, and says what it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from ddtree_bench.metrics import load_checks, speculation_checks
from ddtree_bench.metrics.checked import Check, Checked, Verdict
from ddtree_bench.metrics.throughput import PEAK_LEAST_WALL_S

__all__ = ["Check", "Checked", "checks"]

TOKENS_TOLERANCE = 0.01
"""Most that the client's tokens may differ from the server's, as a share of the server's."""

CACHED_SHARE = 0.5
"""A prompt of which more than this came from the cache had been seen before: shared templates are shorter."""

CACHED_TOKENS = 64
"""Unless it is no more than this: of a short prompt the template, or one page of the cache, is most."""


def checks(of: Checked) -> list[Check]:
    """Return every check of a cell but that of the client's own health, which `client_health` makes."""
    return [Check(name, *judge(of)) for name, judge in CHECKS.items()]


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


def _peak(of: Checked) -> Verdict:
    """The peak is no less than tokens / (floor(wall) + 1): a test of the computation itself, for no load breaks it."""
    peak, wall, tokens = (of.cell[name] for name in ("peak_throughput_tok_s", "wall_s", "output_tokens"))
    if peak is None or wall is None or tokens is None:
        return None, f"there is no peak: the tokens are unknown, or the cell was below {PEAK_LEAST_WALL_S:g} s"
    least = float(tokens) / (int(wall) + 1)
    detail = f"peak {float(peak):.1f} tokens/s, at least {least:.1f} by the mean; a self-test of the computation"
    return float(peak) >= least, detail


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
    hits = sum(row["cached_prompt_tokens"] > max(CACHED_SHARE * row["prompt_tokens"], CACHED_TOKENS) for row in told)
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


CHECKS: Mapping[str, Callable[[Checked], Verdict]] = {
    "complete": _complete,
    "tokens_known": _tokens_known,
    "tokens_agree": _tokens_agree,
    "delivered_load": load_checks.delivered_load,
    "admitted": load_checks.admitted,
    "steady_window": load_checks.steady_window,
    "peak": _peak,
    "method": speculation_checks.method,
    "identity": speculation_checks.identity,
    "tree_branches": speculation_checks.tree_branches,
    "prompts_repeated": _prompts_repeated,
    "cached_prompts": _cached_prompts,
    "lengths": _lengths,
}
"""By name, what judges; the first paragraph of its docstring says what holds."""
