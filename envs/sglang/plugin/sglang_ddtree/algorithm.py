"""DDTREE as a speculative algorithm of SGLang: how its arguments resolve, and how wide its forwards are."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of, record_of, resolving_view
from sglang.srt.arg_groups.speculative_hook import _handle_dflash
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm

from sglang_ddtree import options, server_checks
from sglang_ddtree.options import OptionError, Options, flag
from sglang_ddtree.tree import most_nodes
from sglang_ddtree.widths import Widths

logger = logging.getLogger(__name__)

NAME = "DDTREE"


class DDTreeAlgorithm(CustomSpecAlgo):
    """DFlash drafting, tree verification: everything that asks for the DFLASH family gets yes."""

    def is_dflash(self) -> bool:
        """DFLASH's drafter, hidden state capture and memory accounting are ours."""
        return True

    def is_dflash_family(self) -> bool:
        """As of `is_dflash`."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The draft model runs in TARGET_VERIFY mode."""
        return True

    def supports_mixed_chunk(self) -> bool:
        """As DFLASH."""
        return SpeculativeAlgorithm.DFLASH.supports_mixed_chunk()

    def supports_prefill_shared_read_done(self) -> bool:
        """As DFLASH."""
        return SpeculativeAlgorithm.DFLASH.supports_prefill_shared_read_done()

    def supports_grammar_overlap(self) -> bool:
        """As DFLASH: the verify step takes the scheduler's grammar barrier."""
        return SpeculativeAlgorithm.DFLASH.supports_grammar_overlap()

    def carries_draft_hidden_states(self) -> bool:
        """As DFLASH; CustomSpecAlgo lacks this part of the interface, and the three below."""
        return SpeculativeAlgorithm.DFLASH.carries_draft_hidden_states()

    def need_topk(self) -> bool:
        """As DFLASH: no top-k of a draft goes from round to round."""
        return SpeculativeAlgorithm.DFLASH.need_topk()

    def get_platform_worker_cls(self) -> type | None:
        """No platform brings a worker of its own."""
        return None

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own, of this algorithm."""
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

    def has_draft_kv(self) -> bool:
        """No page is rounded up for each branch: drafts lie in one run behind the committed tokens."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Resolve the block as DFLASH does, then set the target's width; raises OptionError for what cannot be served.

        `server_args` is SGLang's stand-in for the record: it reads resolved values and records what is assigned.
        """
        record = _record_behind(server_args)
        model = model_config_of(record)
        chosen = options.of(record)
        server_checks.check(server_args, record, model, chosen)
        _handle_dflash(record)
        block = int(resolving_view(record).speculative_num_draft_tokens)
        resolved = _fit(chosen, block, model.vocab_size)
        options.attach(record, resolved)
        server_args.speculative_dflash_block_size = block
        server_args.speculative_num_draft_tokens = resolved.budget + 1
        # Backends read the tree's mask only where the top-k is above 1.
        server_args.speculative_eagle_topk = max(resolved.effective_cap, 2)

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int:
        """KV slots of a round, for the reserve: the wider of the two forwards."""
        return Widths.resolved(resolving_view(server_args)).reserve

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows a request: budget + 1 for the target, the block for the draft model."""
        if is_draft_worker:
            return int(get_spec().speculative_dflash_block_size)
        return num_draft_tokens


def _record_behind(stand_in: Any) -> Any:
    """The record that carries our options: the stand-in answers for declared fields only, whatever it is asked."""
    return record_of(object.__getattribute__(stand_in, "_cfg"))


def _fit(chosen: Options, block: int, vocabulary: int) -> Options:
    """The options with a budget cut to the nodes that cap and block can hold, and an explicit cap."""
    if block < 2:
        raise OptionError(f"--speculative-dflash-block-size {block}: a tree needs a block of at least 2")
    cap = min(chosen.effective_cap, vocabulary)
    limit = most_nodes(block - 1, cap)
    if chosen.budget <= limit:
        return replace(chosen, topk_cap=cap)
    logger.warning(
        "%s %d is cut to %d: with %s %d and a block of %d a tree holds no more nodes",
        flag("budget"),
        chosen.budget,
        limit,
        flag("topk_cap"),
        cap,
        block,
    )
    return replace(chosen, budget=limit, topk_cap=min(cap, limit))


def make_worker(_server_args: Any) -> type:
    """The worker class; only a process that runs the model gets here, so only it pays for these imports."""
    from sglang_ddtree import hooks
    from sglang_ddtree.worker import DDTreeWorker

    hooks.install_in_scheduler()
    return DDTreeWorker


def register() -> None:
    """Make DDTREE a name that `--speculative-algorithm` knows."""
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)(make_worker)
