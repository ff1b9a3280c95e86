"""Whether a cell speculated as its method does, and the server's account of it adds up."""

from __future__ import annotations

from typing import Any

from ddtree_bench.metrics.checked import Checked, Verdict


def method(of: Checked) -> Verdict:
    """The server did as the method says: AR has no rounds, DFLASH and DDTREE have some."""
    if of.method is None:
        return None, "the method was not given"
    rounds = of.cell["rounds"]
    counted = of.counters.get("verify_calls_total") if rounds is None else rounds
    if counted is None:
        return None, _with_notes(of, "the server tells of no rounds")
    if of.method == "AR":
        return not counted, f"{float(counted):.0f} rounds in an AR cell"
    if not counted and of.cell["output_tokens"] == of.cell["requests_ok"]:
        return None, "no answer was longer than the prefill's token"
    return bool(counted), f"{float(counted):.0f} rounds in a {of.method} cell"


def identity(of: Checked) -> Verdict:
    """N = prefills + rounds + accepted drafts in every ok request, up to the cut of the last round."""
    broken = of.cell["identity_broken"]
    rounds, retracted = of.cell["rounds"], of.counters.get("retractions_total", 0)
    if not rounds and (of.method == "AR" or rounds == 0):
        return None, "there were no rounds"
    if broken is None and rounds is not None and retracted:
        return None, f"{retracted:.0f} retractions, and whether of requests that are ok the server does not tell"
    if broken is None:
        return None, _with_notes(of, "the server tells of no rounds, or not of those of every request")
    detail = f"N is not prefills + rounds + accepted drafts in {broken} of {of.cell['requests_ok']} requests"
    return broken == 0, f"{detail}; {retracted:.0f} retractions by the server's count" if retracted else detail


def _with_notes(of: Checked, reason: str) -> str:
    return "; ".join((reason, *of.notes))


def tree_branches(of: Checked) -> Verdict:
    """The trees of a DDTREE cell branch: otherwise they were chains."""
    if of.method not in (None, "DDTREE"):
        return None, f"{of.method} has no trees"
    chain = of.cell["tree_is_chain"]
    if chain is None:
        return None, "the server tells of no trees"
    if chain and of.method is None:
        return None, "all trees were chains, which is right for DFLASH; give --method"
    nodes, branching = of.cell["tree_nodes_per_round"], of.cell["tree_branching_nodes_per_round"]
    return not chain, f"{_shown(nodes)} nodes a round, {_shown(branching)} with two children or more"


def _shown(value: Any) -> str:
    return "an unknown number of" if value is None else f"{float(value):.2f}"
