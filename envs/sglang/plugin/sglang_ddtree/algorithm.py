"""DDTREE as a speculative algorithm of SGLang: how its arguments resolve, and how wide its forwards are."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    model_config_of,
    record_of,
    resolved_view,
    resolving_view,
)
from sglang.srt.arg_groups.speculative_hook import _handle_dflash
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import attn_dp_enabled_of, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ddtree import options
from sglang_ddtree.options import OptionError, Options, flag
from sglang_ddtree.round_log import open_log
from sglang_ddtree.tree import most_nodes
from sglang_ddtree.widths import Widths

logger = logging.getLogger(__name__)

NAME = "DDTREE"
TREE_BACKENDS = ("triton", "flashinfer", "fa3")
"""Attention backends whose target verify reads a tree mask; the others would verify a causal chain without a word."""
MLA_TREE_BACKENDS = ("triton", "fa3")
"""The same for MLA models: FlashInfer's MLA kernel takes no mask."""


class DDTreeAlgorithm(CustomSpecAlgo):
    """DFlash drafting, tree verification: everything that asks for the DFLASH family gets yes."""

    def __getattr__(self, name: str) -> Any:
        """Take what CustomSpecAlgo lacks of the enum's interface (create_future_map and the like) from DFLASH."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(SpeculativeAlgorithm.DFLASH, name)

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

    def has_draft_kv(self) -> bool:
        """No page is rounded up for each branch: drafts lie in one run behind the committed tokens."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Resolve the block as DFLASH does, then set the target's width; raises OptionError for what cannot be served.

        `server_args` is SGLang's stand-in for the record: it reads resolved values and records what is assigned.
        """
        record = record_of(object.__getattribute__(server_args, "_cfg"))
        chosen = options.of(record)
        _refuse(server_args, record, chosen)
        _handle_dflash(record)
        block = int(resolving_view(record).speculative_num_draft_tokens)
        resolved = _fit(chosen, block, model_config_of(record).vocab_size)
        options.attach(record, resolved)
        server_args.speculative_dflash_block_size = block
        server_args.speculative_num_draft_tokens = resolved.budget + 1
        # Backends read the tree's mask only where the top-k is above 1.
        server_args.speculative_eagle_topk = max(resolved.effective_cap, 2)

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int:
        """KV slots of a round, for the reserve: the wider of the two forwards."""
        cfg = resolving_view(server_args)
        return Widths(int(cfg.speculative_dflash_block_size), int(cfg.speculative_num_draft_tokens) - 1).reserve

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows a request: budget + 1 for the target, the block for the draft model."""
        if is_draft_worker:
            return int(get_spec().speculative_dflash_block_size)
        return num_draft_tokens


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


def _refuse(cfg: Any, record: Any, chosen: Options) -> None:
    """Raise OptionError for a server that DDTREE cannot run on, before any model is loaded."""
    if cfg.speculative_draft_model_path is None:
        raise OptionError("--speculative-algorithm DDTREE needs --speculative-draft-model-path, the DFlash drafter")
    if cfg.pp_size != 1:
        raise OptionError(f"--pp-size {cfg.pp_size}: DDTREE runs without pipeline parallelism only; use --pp-size 1")
    if attn_dp_enabled_of(cfg):
        raise OptionError(f"--attn-dp-size {cfg.attn_dp_size}: DDTREE runs without attention data parallelism only")
    if cfg.speculative_draft_window_size is not None:
        raise OptionError(
            f"--speculative-draft-window-size {cfg.speculative_draft_window_size}: not supported by DDTREE; "
            "leave it out"
        )
    if cfg.speculative_num_draft_tokens is not None and cfg.speculative_dflash_block_size is None:
        raise OptionError(
            f"--speculative-num-draft-tokens {cfg.speculative_num_draft_tokens}: DDTREE has two widths; give "
            f"--speculative-dflash-block-size for the drafter and {flag('budget')} for the tree"
        )
    if cfg.disaggregation_mode != "null":
        raise OptionError(f"--disaggregation-mode {cfg.disaggregation_mode}: not supported by DDTREE")
    if cfg.watermark_config is not None:
        raise OptionError("--watermark-config: not supported by DDTREE; leave it out")
    simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if simulated > 0:
        raise OptionError(f"SGLANG_SIMULATE_ACC_LEN={simulated}: DDTREE does not simulate acceptance; unset it")
    if chosen.round_log is not None:
        open_log(chosen.round_log).close()
    model = model_config_of(record)
    _refuse_backend(record, model)
    if mambaish_config(model) is not None and not chosen.allow_hybrid_unsafe:
        raise OptionError(
            f"--model-path {cfg.model_path}: a hybrid model, whose recurrent state under a tree is not proven right; "
            f"{flag('allow_hybrid_unsafe')} serves it all the same"
        )


def _refuse_backend(record: Any, model: Any) -> None:
    mla = model.attention_arch == AttentionArch.MLA
    able = MLA_TREE_BACKENDS if mla else TREE_BACKENDS
    for backend in attention_backends_of(resolved_view(record)):
        if backend is not None and backend not in able:
            raise OptionError(
                f"--attention-backend {backend}: cannot mask a tree{' of an MLA model' if mla else ''}; "
                f"use one of {', '.join(able)}"
            )


def make_worker(_server_args: Any) -> type:
    """The worker class; only a process that runs the model gets here, so only it pays for these imports."""
    from sglang_ddtree import hooks
    from sglang_ddtree.worker import DDTreeWorker

    hooks.install_in_scheduler()
    return DDTreeWorker


def register() -> None:
    """Make DDTREE a name that `--speculative-algorithm` knows."""
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)(make_worker)
