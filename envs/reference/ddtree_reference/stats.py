"""Counts of speculation: of one answer, as SGLang reports them with a response, and of the server's life."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ddtree_reference import tree
from ddtree_reference.decode import Round
from ddtree_reference.method import Method


@dataclass
class SpecCounts:
    """Verify rounds of one answer. Accepted drafts are counted before the cut at max_tokens, EOS or stop strings."""

    rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    histogram: list[int] = field(default_factory=list)  # index k: rounds with k accepted drafts
    tree_nodes: int = 0
    tree_branching_nodes: int = 0
    tree_max_depth: int = 0

    def add(self, step: Round) -> None:
        """Count a round of the answer; prefill and AR's rounds verify nothing."""
        if not step.verifies:
            return
        self.rounds += 1
        self.accepted += step.accepted
        self.proposed += step.width - 1
        self.histogram.extend([0] * (step.accepted + 1 - len(self.histogram)))
        self.histogram[step.accepted] += 1
        if step.tree is not None:
            self.tree_nodes += len(step.tree.parents) - 1
            self.tree_branching_nodes += tree.branching_nodes(step.tree.parents)
            self.tree_max_depth = max(self.tree_max_depth, *step.tree.depths)

    def details(self, method: Method, completion_tokens: int) -> dict[str, Any]:
        """The object `spec_tokens_details`. SGLang's accept length is completion tokens over verify rounds."""
        if method.algorithm == "AR":
            return {
                "spec_verify_ct": 0,
                "spec_accept_length": None,
                "spec_accept_rate": None,
                "spec_num_correct_drafts": 0,
                "spec_num_proposed_drafts": 0,
                "spec_correct_drafts_histogram": None,
            }
        details: dict[str, Any] = {
            "spec_verify_ct": self.rounds,
            "spec_accept_length": completion_tokens / self.rounds if self.rounds else None,
            "spec_accept_rate": self.accepted / self.proposed if self.proposed else None,
            "spec_num_correct_drafts": self.accepted,
            "spec_num_proposed_drafts": self.proposed,
            "spec_correct_drafts_histogram": list(self.histogram),
        }
        if method.algorithm == "DDTREE":
            details["spec_tree_nodes"] = self.tree_nodes
            details["spec_tree_branching_nodes"] = self.tree_branching_nodes
            details["spec_tree_max_depth"] = self.tree_max_depth
        return details


@dataclass
class Counters:
    """What the server has done since its start, and how full it is now.

    Running and queued requests, KV slots in use and free regions are of now; the others only grow.
    """

    requests_total: int = 0
    aborted_requests_total: int = 0
    failed_requests_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    rounds_total: int = 0
    verify_calls_total: int = 0
    accepted_drafts_total: int = 0
    proposed_drafts_total: int = 0
    running_requests: int = 0
    queued_requests: int = 0
    max_running_requests: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    kv_regions_free: int = 0

    def add(self, step: Round, tokens: int) -> None:
        """Count a round's verification and the `tokens` of it that became part of an answer."""
        self.generation_tokens_total += tokens
        self.verify_calls_total += step.verifies
        self.accepted_drafts_total += step.accepted
        self.proposed_drafts_total += max(0, step.width - 1)

    def snapshot(self) -> dict[str, int]:
        """The counters as plain numbers."""
        return asdict(self)
