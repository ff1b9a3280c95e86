"""Verification: the target's own choice at every node, and the walk along those choices.

Greedy or sampled, the token after a node is what the target itself would take there: its best token, or a draw from
its distribution by the sampler that AR uses. The walk goes to the child that is that token. So every committed token
is the target's, given those before it, and the drafts decide only how many are found in a round: nothing is lost at
any temperature, and no draft probability is needed (Leviathan et al. 2023 accept by ratio instead).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch import Tensor


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """What the target verifies; its type tells our verification from EAGLE's.

    `sampler` is the target's, `tp_sync` what makes all ranks of a TP group take rank 0's tokens.
    """

    sampler: Any = None
    tp_sync: SpecTpSync | None = None

    @property
    def tree_topk(self) -> int:
        """-1: an irregular tree."""
        return -1


def sample(
    original: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of SGLang's `eagle_sample`: walk our trees, and leave every other verification to `original`.

    `others` are of UNO's sampling and of watermarks, which a DDTREE server refuses at its start.

    Returns the target's token at each accepted node [batch * width] (zeros elsewhere), the number of tokens that each
    request commits [batch], and the accepted nodes, root first [batch, depth + 1], -1 behind them.
    """
    if not isinstance(verify_input, DDTreeVerifyInput) or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, grammar_mask, **others)
    width = verify_input.draft_token_num
    info = batch.sampling_info
    logits = logits_output.next_token_logits
    sanitize_nan_logits(logits, "verify: target model logits")
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.is_all_greedy:
        chosen = torch.argmax(logits, dim=-1)
        site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
    else:
        chosen = draw(logits, info, verify_input.positions, width, verify_input.sampler)
        site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
    if verify_input.tp_sync is not None:
        verify_input.tp_sync.sync(site, chosen)
    return walk(verify_input, chosen.view(-1, width))


def draw(logits: Tensor, info: Any, positions: Tensor, width: int, sampler: Any) -> Tensor:
    """One draw a row from the target's distribution there, [rows] of logits [rows, vocabulary].

    SGLang's own sampler does it, with each request's parameters for all of its `width` rows. A seed, which SGLang heeds
    with --enable-deterministic-inference alone, decides a draw with the position, so a request gets AR's very tokens.
    """
    rows = per_row(info, width)
    probabilities = torch.softmax(logits.float() / rows.temperatures, dim=-1)
    plain = not (rows.need_top_p_sampling or rows.need_top_k_sampling or rows.need_min_p_sampling)
    tokens, _ = sampler._sample_from_probs(probabilities, rows, positions, plain)
    return tokens.long()


def per_row(info: Any, width: int) -> Any:
    """Sampling parameters of a batch of requests, repeated for the `width` rows that each verifies."""
    repeated = {
        name: getattr(info, name).repeat_interleave(width, dim=0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        if getattr(info, name) is not None
    }
    return replace(info, **repeated)


def walk(verify_input: EagleVerifyInput, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's tokens `chosen` [batch, width] down each tree, as of `sample`."""
    batch, width = chosen.shape
    device = chosen.device
    predict, accepted, drafts = verify_tree_greedy_func(
        predicts=torch.zeros(batch * width, dtype=torch.int32, device=device),
        accept_index=torch.full((batch, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(batch, dtype=torch.int32, device=device),
        candidates=verify_input.draft_token.view(batch, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=chosen,
        topk=verify_input.tree_topk,
    )
    return predict, drafts + 1, accepted
