"""How a round's numbers get from the worker to those who report them, on the way that SGLang takes its own result.

Numbers of the device travel as the result's auxiliary output: SGLang queues their copy with that of the tokens, before
the event that it waits for, and hands them back once it has committed the tokens, under overlap scheduling an iteration
later. So a report waits for nothing and misses no round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from sglang_ddtree import __version__
from sglang_ddtree.counters import RoundCounters
from sglang_ddtree.release import RELEASE
from sglang_ddtree.round_log import RoundLog
from sglang_ddtree.rounds import RequestRound, Round
from sglang_ddtree.stage_clock import NO_CLOCK, StageClock, new_clock
from sglang_ddtree.tree import DraftTree, branching_nodes
from sglang_ddtree.widths import Widths

Listener = Callable[[Round], None]


class Reports:
    """Who wants to hear of rounds; while nobody does, a round pays nothing for it."""

    def __init__(self, budget: int, device: torch.device | str) -> None:
        self.listeners: list[Listener] = []
        self._budget = budget
        self._device = device

    def clock(self) -> StageClock:
        """The clock of a round that begins now."""
        return new_clock(self._device) if self.listeners else NO_CLOCK

    def add(self, verified: Any, tree: DraftTree, clock: StageClock) -> None:
        """Send the round's numbers along with its result, `verified`; the last thing in a round."""
        if not self.listeners:
            return
        numbers = torch.stack((verified.accept_lens.long() - 1, branching_nodes(tree), tree.depths.amax(dim=1)))
        output = verified.logits_output
        output.auxiliary_device_output = append_auxiliary_output(
            output.auxiliary_device_output,
            RoundOutput(numbers, clock, self._budget, bool(verified.can_run_cuda_graph), self.listeners),
        )


@dataclass(frozen=True)
class RoundOutput:
    """A round's numbers, on the device or, once copied, on the host: SGLang's Device- and HostAuxiliaryOutput.

    `numbers` [3, batch] int64: accepted drafts, branching nodes and depth of each request.
    """

    numbers: Tensor
    clock: StageClock
    budget: int
    cuda_graph: bool
    listeners: Sequence[Listener]

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> RoundOutput:
        """Queue the copy by `copy_tensor`; the result is to be read after the event that SGLang records then."""
        self.clock.copy_to_host(copy_tensor)
        return RoundOutput(copy_tensor(self.numbers), self.clock, self.budget, self.cuda_graph, self.listeners)

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Tell the listeners; `commits` has for each request of `batch` the tokens that its answer grew by, or None."""
        numbers = zip(*self.numbers.tolist(), strict=True)
        requests = [
            RequestRound(req.rid, accepted, len(commit.token_ids), branching, depth)
            for req, commit, (accepted, branching, depth) in zip(batch.reqs, commits, numbers, strict=True)
            if commit is not None
        ]
        discarded = len(commits) - len(requests)
        done = Round(requests, discarded, self.budget, self.cuda_graph, self.clock.seconds())
        for listener in self.listeners:
            listener(done)


def new_round_log(path: str, server_args: Any, widths: Widths, cap: int) -> RoundLog:
    """The log of this scheduler's rounds, which says first what serves them. Raises OptionError as RoundLog."""
    parallel = get_parallel()
    replica = {} if parallel.dp_rank is None else {"dp_rank": parallel.dp_rank}
    meta = {
        "sglang": RELEASE,
        "sglang_ddtree": __version__,
        "model": server_args.model_path,
        "draft_model": server_args.speculative_draft_model_path,
        "budget": widths.budget,
        "topk_cap": cap,
        "block": widths.block,
        "verify_width": widths.verify,
        "draft_width": widths.draft,
        "tp_size": parallel.tp_size,
    }
    return RoundLog(path, meta | replica, replica)


def count_rounds(_result: None, scheduler: Any) -> None:
    """A hook behind `Scheduler.init_metrics_reporter`: let a scheduler that keeps metrics count the rounds too."""
    if scheduler.metrics_reporter.current_scheduler_metrics_enabled:
        worker = scheduler.draft_worker
        worker.reports.listeners.append(RoundCounters(scheduler.metrics_collector, worker.widths.depth))


def snapshot_as_dflash(reporter: Any, batch: Any, result: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook before `snapshot_spec_decode_metrics`: the forward-pass metrics of a round are taken as DFLASH's are.

    SGLang takes them before a result is settled for the algorithms that it lists, and too late for any other.
    """
    if not reporter.scheduler.enable_fpm:
        return None
    listed = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.DFLASH, reqs=batch.reqs)
    return (reporter, listed, result), {}
