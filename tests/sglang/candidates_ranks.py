"""A tensor-parallel group of processes that finds candidates with SGLang's own ParallelLMHead and LogitsProcessor.

Run as ``python candidates_ranks.py RANKS FOLDER`` by the SGLang environment's Python. FOLDER/request.pt holds the
``cases`` and the options of ServerArgs as ``server_args``; the ranks meet over FOLDER/store. Each case has ``weight``
(the whole vocabulary), ``hidden`` (one tensor for each attention data-parallel rank), ``cap``, ``scale``, ``softcap``
and ``fp32``. FOLDER/RANK.pt gets one dictionary a case: the candidates, the shard's layout, SGLang's own gathered
logits (scaled, not soft-capped) and what its log-sum-exp kernel makes of the shard's first ``cap`` logits.
"""

import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.logsumexp import row_logsumexp
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from sglang_ddtree.candidates import CandidateHead


def join_group(rank: int, ranks: int, store: Path, server_args: dict) -> None:
    """Publish the topology and build SGLang's process groups over gloo."""
    publish(
        ServerArgs(model_path="dummy", device="cpu", tp_size=ranks, **server_args),
        role="test",
        ranks=SpawnRanks(world_rank=rank),
    )
    init_distributed_environment(ranks, rank, f"file://{store}", rank, backend="gloo")
    initialize_model_parallel(backend="gloo")
    # SGLang wraps this collective into a torch operator that it registers for accelerators alone.
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor


def rank_case(case: dict) -> dict:
    """Rank one case's candidates beside SGLang's own logits."""
    weight = case["weight"]
    head = ParallelLMHead(
        *weight.shape, params_dtype=weight.dtype, use_attn_tp_group=get_parallel().enable_dp_lm_head
    ).requires_grad_(False)
    head.weight_loader(head.weight, weight)
    config = SimpleNamespace(vocab_size=weight.shape[0], final_logit_softcapping=case["softcap"])
    processor = LogitsProcessor(config, logit_scale=case["scale"])
    processor.use_fp32_lm_head = case["fp32"]
    hidden = case["hidden"][get_parallel().attn_dp_rank]
    found = CandidateHead(head, processor, case["cap"])(hidden)
    shard = processor._compute_lm_head(hidden, head)
    largest, log_sum = row_logsumexp(shard[:, : case["cap"]])
    processor.final_logit_softcapping = None  # its kernel calls libdevice, which Triton's interpreter lacks
    metadata = SimpleNamespace(next_token_logits_buffer=None, forward_mode=None)
    return {
        "ids": found.ids,
        "log_probs": found.log_probs,
        # Gloo refuses the shapes that the release gathers over an attention group.
        "logits": None if head.use_attn_tp_group else processor._get_logits(hidden, head, metadata),
        "shard_logits": shard,
        "kernel_log_sums": largest + log_sum,
        "real_rows": head.shard_indices.num_org_elements,
    }


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    """Answer every case of the request as one rank."""
    request = torch.load(folder / "request.pt")
    join_group(rank, ranks, folder / "store", request["server_args"])
    torch.save([rank_case(case) for case in request["cases"]], folder / f"{rank}.pt")


def main(ranks: int, folder: Path) -> int:
    """Run all ranks; returns how many failed."""
    # Forked, because importing SGLang takes seconds and has started no threads yet.
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(rank, ranks, folder), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
