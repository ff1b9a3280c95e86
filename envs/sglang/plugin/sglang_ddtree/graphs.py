"""CUDA graphs of the two forwards: the target's is captured with a tree mask, the draft's with the top-k inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from sglang_ddtree.candidates import CandidateHead, Candidates
from sglang_ddtree.sampling import DDTreeVerifyInput
from sglang_ddtree.widths import Widths

CAPTURED_WITH_MASK = "ddtree_captured_with_mask"
"""Set on the runner whose graphs were captured through `spec_info`."""


def spec_info(original: Callable[..., Any], runner: Any, num_tokens: int) -> Any:
    """What a verify graph is captured with: for the target a tree mask, of the type that replays bring.

    SGLang's DFLASH branch captures without a mask on backends that verify a chain causally. A graph captured so would
    replay trees as chains: every committed token would be another one's. The draft model's graph is DFLASH's.
    """
    if runner.model_runner.is_draft_worker:
        return original(runner, num_tokens)
    setattr(runner, CAPTURED_WITH_MASK, True)
    return _without_tree(runner.buffers.custom_mask)


def dummy_verify_input(
    original: Callable[..., Any], algorithm: Any, custom_mask: Tensor, num_tokens_per_req: int, is_draft_worker: bool
) -> Any:
    """What kernels are tuned and warmed up with: for the target a tree mask, which backends read at a top-k above 1."""
    if is_draft_worker or algorithm.name != "DDTREE":
        return original(algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    return _without_tree(custom_mask)


def _without_tree(custom_mask: Tensor) -> DDTreeVerifyInput:
    """A verify input that has the shape of our rounds, and a mask, but no tree yet."""
    spec = get_spec()
    widths = Widths.resolved(spec)
    return DDTreeVerifyInput(
        draft_token=None,
        custom_mask=custom_mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=widths.depth,
        topk=int(spec.speculative_eagle_topk),
        draft_token_num=widths.verify,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def check_captured(target: Any, draft: Any, widths: Widths) -> None:
    """Raise RuntimeError unless the captured graphs have the two widths, and the target's a mask.

    `target` and `draft` are the runners of the two decode forwards; one without graphs runs eagerly and passes.
    SGLang's replay guard would only fall back to eager when a width differs, and nobody would see why it is slow.
    """
    for name, runner, width in (("verify", target, widths.verify), ("draft", draft, widths.draft)):
        captured = getattr(runner, "captured_req_width", width)
        if captured != width:
            raise RuntimeError(f"DDTREE: the {name} graph was captured for {captured} rows a request, not {width}")
    if hasattr(target, "captured_req_width") and not getattr(target, CAPTURED_WITH_MASK, False):
        raise RuntimeError("DDTREE: the verify graph was captured without a tree mask; it would replay a chain")


class GraphCandidates:
    """The head and its top-k at the end of the captured draft forward, into buffers that replays fill again.

    `ids` and `log_probs` [batch * depth, candidates], for up to `max_batch` requests of `block` rows.
    """

    def __init__(self, head: CandidateHead, widths: Widths, max_batch: int, device: torch.device | str):
        self._head = head
        self._block, self._depth = widths.block, widths.depth
        rows = max_batch * widths.depth
        self._ids = torch.zeros(rows, head.cap, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(rows, head.cap, dtype=torch.float32, device=device)

    def __call__(self, hidden: Tensor, _input_ids: Tensor) -> None:
        """Run at the end of a forward that is being captured; `hidden` [batch * block, width of the model]."""
        found = self._head(drafted_rows(hidden, self._block, self._depth))
        rows = found.ids.shape[0]
        self._ids[:rows].copy_(found.ids)
        self._log_probs[:rows].copy_(found.log_probs)

    def read(self, batch: int) -> Candidates:
        """The candidates of the replay that has just run, for its first `batch` requests."""
        rows = batch * self._depth
        return Candidates(self._ids[:rows], self._log_probs[:rows])


def drafted_rows(hidden: Tensor, block: int, depth: int) -> Tensor:
    """The hidden states of the masks that a tree can use, [batch * depth, width]: the first depth behind the anchor."""
    rows = hidden.view(-1, block, hidden.shape[-1])[:, 1 : depth + 1]
    return rows.reshape(-1, hidden.shape[-1])
