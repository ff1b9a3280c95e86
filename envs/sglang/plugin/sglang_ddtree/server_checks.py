"""What a DDTREE server refuses before any model is loaded: each would fail late, or be wrong with nobody noticing."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import attn_dp_enabled_of

from sglang_ddtree.options import OptionError, Options, flag
from sglang_ddtree.round_log import check_writable

TREE_BACKENDS = ("triton", "flashinfer", "fa3")
"""Attention backends whose target verify reads a tree mask; the others would verify a causal chain without a word."""
MLA_TREE_BACKENDS = ("triton", "fa3")
"""The same for MLA models: FlashInfer's MLA kernel takes no mask."""
WINDOW_TREE_BACKEND = "fa3"
"""With a sliding window Triton takes a node's row for its position, and FlashInfer cuts keys but not the mask."""


def check(cfg: Any, record: Any, model: Any, chosen: Options) -> None:
    """Raise OptionError, which names option, value and remedy; `cfg` reads resolved values of `record`."""
    _check_drafter(cfg)
    _check_parallelism(cfg)
    _check_sampling(cfg)
    _check_modes(cfg)
    if chosen.round_log is not None:
        check_writable(chosen.round_log)
    _check_backend(cfg, record, model)
    if mambaish_config(model) is not None and not chosen.allow_hybrid_unsafe:
        raise OptionError(
            f"--model-path {cfg.model_path}: a hybrid model, whose recurrent state under a tree is not proven right; "
            f"{flag('allow_hybrid_unsafe')} serves it all the same"
        )


def _check_drafter(cfg: Any) -> None:
    if cfg.speculative_draft_model_path is None:
        raise OptionError("--speculative-algorithm DDTREE needs --speculative-draft-model-path, the DFlash drafter")
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
    if envs.SGLANG_DFLASH_EAGER_DRAFT_SAMPLER.get():
        raise OptionError("SGLANG_DFLASH_EAGER_DRAFT_SAMPLER=1: DDTREE's top-k is part of the draft graph; unset it")


def _check_parallelism(cfg: Any) -> None:
    if cfg.pp_size != 1:
        raise OptionError(f"--pp-size {cfg.pp_size}: DDTREE runs without pipeline parallelism only; use --pp-size 1")
    if attn_dp_enabled_of(cfg):
        raise OptionError(f"--attn-dp-size {cfg.attn_dp_size}: DDTREE runs without attention data parallelism only")
    if cfg.disaggregation_mode != "null":
        raise OptionError(f"--disaggregation-mode {cfg.disaggregation_mode}: not supported by DDTREE")


def _check_sampling(cfg: Any) -> None:
    """The target's own tokens decide: rules that accept others, or draw them in another way, would be ignored."""
    for name in ("single", "acc"):
        threshold = getattr(cfg, f"speculative_accept_threshold_{name}")
        if threshold != 1.0:
            raise OptionError(
                f"--speculative-accept-threshold-{name} {threshold}: DDTREE accepts the target's tokens alone; "
                "leave it out"
            )
    if cfg.speculative_use_rejection_sampling:
        raise OptionError("--speculative-use-rejection-sampling: DDTREE needs none to be lossless; leave it out")
    if cfg.rl_on_policy_target is not None:
        raise OptionError(f"--rl-on-policy-target {cfg.rl_on_policy_target}: not supported by DDTREE; leave it out")


def _check_modes(cfg: Any) -> None:
    if cfg.watermark_config is not None:
        raise OptionError("--watermark-config: not supported by DDTREE; leave it out")
    simulated = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if simulated > 0:
        raise OptionError(f"SGLANG_SIMULATE_ACC_LEN={simulated}: DDTREE does not simulate acceptance; unset it")


def _check_backend(cfg: Any, record: Any, model: Any) -> None:
    prefill, decode = attention_backends_of(resolved_view(record))
    backend = decode if cfg.speculative_attention_mode == "decode" else prefill
    mla = model.attention_arch == AttentionArch.MLA
    able = MLA_TREE_BACKENDS if mla else TREE_BACKENDS
    if backend is not None and backend not in able:
        raise OptionError(
            f"--attention-backend {backend}: cannot mask a tree{' of an MLA model' if mla else ''}; "
            f"use one of {', '.join(able)}"
        )
    if model.is_hybrid_swa:
        check_window(backend, cfg.page_size, cfg.model_path)


def check_window(backend: str | None, page_size: int | None, model_path: str) -> None:
    """Raise OptionError for a target with a sliding window on a backend that would mask its trees wrongly."""
    if backend != WINDOW_TREE_BACKEND or page_size not in (None, 1):
        raise OptionError(
            f"--model-path {model_path}: a target with a sliding window, which attention backend {backend} with pages "
            f"of {page_size} tokens does not mask rightly; use --attention-backend {WINDOW_TREE_BACKEND} --page-size 1"
        )
