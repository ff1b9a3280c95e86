"""The DDTREE worker: DFlash drafts, a tree is built on the device, the target verifies it, the path is committed.

A round of a batch, whose requests each hold the token that the last round chose (the root, not yet computed):

1. draft    the draft model runs on [root, mask, ...], `block` rows a request; the target's head gives the best
            candidates of each depth with their log-probabilities
2. tree     the `budget` most probable paths become the nodes of a tree
3. verify   the target runs on root and nodes, `budget + 1` rows a request, each seeing its own path only
4. accept   the walk along the target's own tokens; its KV, tokens and hidden states move to the front
5. commit   the hidden states of the accepted path go into the drafter's KV cache

Prefill is DFLASH's. Nothing between the two forwards loops over requests or waits for the device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import attention_backends, get_exec, get_observability, get_parallel, get_spec
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _resolve_dflash_embedding_module
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input, run_eagle_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from sglang_ddtree import graphs, options, server_checks
from sglang_ddtree.candidates import CandidateHead, Candidates
from sglang_ddtree.lineage import encode
from sglang_ddtree.reports import Reports, new_round_log
from sglang_ddtree.sampling import DDTreeVerifyInput, draw
from sglang_ddtree.stage_clock import StageClock
from sglang_ddtree.tree import DraftTree
from sglang_ddtree.tree_kernel import tree_builder
from sglang_ddtree.widths import Widths

if TYPE_CHECKING:
    from sglang_ddtree.device_time import TimedSampler


@dataclasses.dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """What a batch carries from round to round."""

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve slots for the wider of the two forwards; DFLASH's own reserve is by the target's alone.

        With budget + 1 below the block, the draft forward would else write into slots of other requests.
        """
        with get_spec().override(speculative_num_draft_tokens=Widths.resolved(get_spec()).reserve):
            super().prepare_for_decode(batch)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The slots behind the committed tokens, [batch, block], where both forwards of a round begin."""

    positions: Tensor
    slots: Tensor
    plan: Any


class DDTreeWorker(DFlashWorkerV2):
    """DFLASH's worker with a tree between its two forwards."""

    block_size: int

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        chosen = options.of(server_args)
        self.widths = Widths.resolved(get_spec())
        self.candidates = chosen.effective_cap
        with self._drafting():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if self.model_runner.sliding_window_size:
            prefill, decode = attention_backends()
            backend = decode if get_spec().speculative_attention_mode == "decode" else prefill
            server_checks.check_window(backend, self.page_size, server_args.model_path)
        if self.selector is not None or self.lilicorr is not None or self._is_domino:
            raise ValueError(
                f"--speculative-draft-model-path {server_args.speculative_draft_model_path}: not a plain DFlash "
                "drafter; a tree needs independent distributions, which DFlash 2, Domino and LiLiCorr do not give"
            )
        # From here on the name means what the target verifies, as everywhere else in SGLang.
        self.speculative_num_draft_tokens = self.widths.verify
        self._head = self._candidate_head()
        self._build_tree = tree_builder(self.widths.depth, self.candidates, self.widths.budget, self.device)
        self.reports = Reports(self.widths.budget, self.device)
        self._timed_sampler: TimedSampler | None = None
        if chosen.round_log is not None and get_parallel().tp_rank == 0:
            self.reports.listeners.append(new_round_log(chosen.round_log, server_args, self.widths, self.candidates))

    def _drafting(self) -> contextlib.AbstractContextManager[Any]:
        """The settings under which the draft model is built and captured: a chain of one block."""
        return get_spec().override(speculative_num_draft_tokens=self.widths.draft, speculative_eagle_topk=1)

    def _defer_target_verify_gather(self) -> LogitsProcessor | None:
        """Let the target gather its logits: the walk reads whole rows."""
        return None

    def init_attention_backends(self) -> None:
        """Build the draft model's backend for a block."""
        with self._drafting():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Capture the draft model's graph for a block, and look at the target's."""
        with self._drafting():
            super().init_cuda_graphs()
        graphs.check_captured(
            self.model_runner.decode_cuda_graph_runner, self.draft_model_runner.decode_cuda_graph_runner, self.widths
        )

    def _maybe_build_draft_sampler(self) -> graphs.GraphCandidates | TimedSampler:
        """What is captured at the end of the draft graph: the top-k in the place of DFLASH's argmax."""
        max_batch = max(get_exec().graph.cuda_graph_config.decode.bs)
        sampler = graphs.GraphCandidates(self._head, self.widths, max_batch, self.device)
        if torch.version.cuda is None or not (self.reports.listeners or get_observability().enable_metrics):
            return sampler
        from sglang_ddtree.device_time import TimedSampler

        self._timed_sampler = TimedSampler(sampler, self.device)
        return self._timed_sampler

    def prewarm_sampling(self) -> Any:
        """Rehearse the largest sampled verification on a GPU, so that memory which it lacks is missed at start-up."""
        block, self.block_size = self.block_size, self.widths.verify
        try:
            return super().prewarm_sampling()
        finally:
            self.block_size = block

    def _measure_sampling_peak(self, *, candidates: Tensor, target_logits: Tensor, sampling_info: Any) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        positions = torch.zeros(candidates.numel(), dtype=torch.int64, device=candidates.device)
        # DFLASH's kernels are told to skip the top-k; AR's sampler, which draws here, takes 0 at its word.
        sampling_info = dataclasses.replace(sampling_info, top_ks=torch.full_like(sampling_info.top_ks, TOP_K_ALL))
        draw(target_logits, sampling_info, positions, candidates.shape[1], self.model_runner.sampler)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _candidate_head(self) -> CandidateHead:
        target = self.model_runner.model
        processor = next(module for module in target.modules() if isinstance(module, LogitsProcessor))
        return CandidateHead(target.lm_head, processor, self.candidates)

    def _make_next_draft_input_prefill(self, *, bonus_tokens: Tensor, seq_lens: Tensor) -> DDTreeDraftInput:
        return self._make_next_draft_input_decode(bonus_tokens=bonus_tokens, new_seq_lens=seq_lens)

    def _make_next_draft_input_decode(self, *, bonus_tokens: Tensor, new_seq_lens: Tensor) -> DDTreeDraftInput:
        base = super()._make_next_draft_input_decode(bonus_tokens=bonus_tokens, new_seq_lens=new_seq_lens)
        return DDTreeDraftInput(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Prefill as DFLASH, or one round."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        with torch.inference_mode():
            return self._round(batch, on_publish, grammar_barrier)

    def _validate_phase1_sampling_support(self, _batch: Any) -> None:
        """Nothing to warn of: sampled verification works on every device."""

    def _round(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        # Overlap scheduling made the lengths on another stream.
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        roots = batch.spec_info.bonus_tokens.view(-1).to(torch.int64)
        clock = self.reports.clock()
        block = self._plan_block(batch)
        candidates = self._draft(batch, roots, block, clock)
        tree = self._build_tree(candidates.log_probs)
        verify_input = self._verify_input(batch, roots, candidates.ids, tree)
        clock.mark("tree")
        verified = self._verify(batch, verify_input, grammar_barrier)
        clock.mark("verify")
        if on_publish is not None:
            on_publish(verified.new_seq_lens)
        self._commit(batch, block, verified)
        clock.mark("commit")
        self.reports.add(verified, tree, clock)
        return GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=verified.next_token_ids,
            accept_lens=verified.accept_lens,
            can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=verified.next_draft_input.bonus_tokens, new_seq_lens=verified.new_seq_lens
            ),
            speculative_num_draft_tokens=self.widths.verify,
            new_seq_lens=verified.new_seq_lens,
            routed_experts_output=verified.routed_experts_output,
            indexer_topk_output=verified.indexer_topk_output,
            extra_keep_alive_refs=verified.extra_keep_alive_refs,
        )

    def _plan_block(self, batch: Any) -> _Block:
        positions = batch.seq_lens[:, None] + self._block_pos_offsets
        table = self.model_runner.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices.long()[:, None], positions.long()].to(torch.int64)
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=_host_lengths(batch, 0),
            write_virtual=slots.reshape(-1),
            read_extent=self.widths.draft,
        )
        return _Block(positions, slots, plan)

    def _draft(self, batch: Any, roots: Tensor, block: _Block, clock: StageClock) -> Candidates:
        """The draft model's candidates: ids and log-probabilities [batch, depth, candidates], best first."""
        forward_batch = self._draft_forward_batch(batch, roots, block)
        with draft_tp_context(self.draft_parallel_layout):
            out = self.draft_model_runner.forward(forward_batch)
        clock.mark("draft")
        if self._draft_sampler is not None and out.can_run_graph:
            found = self._draft_sampler.read(len(roots))
            if self._timed_sampler is not None:
                clock.split("draft", "head_topk", self._timed_sampler.nanoseconds())
        else:
            hidden = out.logits_output.hidden_states
            found = self._head(graphs.drafted_rows(hidden, self.widths.block, self.widths.depth))
            clock.mark("head_topk")
        shape = (len(roots), self.widths.depth, -1)
        return Candidates(found.ids.view(shape), found.log_probs.view(shape))

    def _draft_forward_batch(self, batch: Any, roots: Tensor, block: _Block) -> ForwardBatch:
        ids = torch.full_like(block.slots, int(self._mask_token_id))
        ids[:, 0] = roots
        host_lengths = _host_lengths(batch, self.widths.draft)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(roots),
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=block.slots.reshape(-1),
            seq_lens_sum=int(host_lengths.sum()),
            seq_lens_cpu=host_lengths,
            positions=block.positions.reshape(-1),
            input_embeds=self._embed(ids).flatten(0, 1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=self._rows_of_experts(ids.numel()),
            global_num_token_non_padded_cpu=ids.numel(),
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        block.plan.bind(forward_batch, self.draft_model_runner.kv_index_translator)
        return forward_batch

    def _rows_of_experts(self, rows: int) -> Tensor | None:
        """Rows that are not padding, for a draft model with experts on other ranks; None where nobody reads it."""
        if not enable_num_token_non_padded():
            return None
        return torch.full((), rows, dtype=torch.int32, device=self.device)

    def _embed(self, ids: Tensor) -> Tensor:
        if self._full_embed_gpu is not None:
            embeddings = torch.nn.functional.embedding(ids, self._full_embed_gpu)
        else:
            embed = _resolve_dflash_embedding_module(self.draft_model, self.model_runner.model)
            embeddings = embed(ids)
        return embeddings * self._noise_embed_scale

    def _verify(self, batch: Any, verify_input: DDTreeVerifyInput, barrier: Any) -> GenerationBatchResult:
        """Run the target on root and nodes, walk, and move the accepted path to the front."""
        batch = copy.copy(batch)  # SGLang's helpers rebind fields of the batch that they verify
        batch.spec_info = verify_input
        return run_eagle_verify(
            batch,
            target_worker=self.target_worker,
            req_to_token_pool=self.model_runner.req_to_token_pool,
            token_to_kv_pool_allocator=self.model_runner.token_to_kv_pool_allocator,
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            topk=batch.spec_info.topk,
            num_draft_tokens=self.widths.verify,
            device=self.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
            grammar_barrier=barrier,
        )

    def _verify_input(self, batch: Any, roots: Tensor, ids: Tensor, tree: DraftTree) -> DDTreeVerifyInput:
        tokens = ids.flatten(1).gather(1, (tree.depths - 1) * ids.shape[2] + tree.ranks)
        lineage = encode(tree, ids.shape[2], self.widths.depth)
        base = build_eagle_verify_input(
            batch,
            EagleDraftInput(bonus_tokens=roots),
            lineage.parents,
            lineage.edges,
            tokens,
            None,
            target_worker=self.target_worker,
            topk=lineage.topk,
            num_steps=self.widths.depth,
            num_draft_tokens=self.widths.verify,
            tree_mask_mode=default_tree_mask_mode(),
            device=self.device,
        )
        return DDTreeVerifyInput(
            **{field.name: getattr(base, field.name) for field in dataclasses.fields(base)},
            sampler=self.model_runner.sampler,
            tp_sync=self._tp_sync,
        )

    def _commit(self, batch: Any, block: _Block, verified: GenerationBatchResult) -> None:
        """Write the accepted path's hidden states, which lie in front now, into the drafter's KV cache."""
        batch_size, n = len(batch.seq_lens), self.widths.depth + 1
        hidden = verified.logits_output.hidden_states.view(batch_size, self.widths.verify, -1)[:, :n]
        slots = self._draft_write_ids(block.plan).view(batch_size, self.widths.draft)[:, :n].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.reshape(batch_size * n, -1),
            cache_loc=slots.view(-1),
            cache_loc_2d=slots,
            positions=block.positions[:, :n].reshape(-1),
            commit_lens=verified.accept_lens,
        )
        # Large, used up, and copied to the host by overlap scheduling if it stayed.
        verified.logits_output.hidden_states = None


def _host_lengths(batch: Any, more: int) -> Tensor:
    """Bounds [batch] on the lengths after `more` tokens: exact where the host knows them, else what is reserved."""
    if batch.seq_lens_cpu is None:
        return batch.spec_info.nxt_kv_lens_cpu
    return batch.seq_lens_cpu + more
