"""The target's best tokens for each drafted position, from its vocabulary-parallel head.

Every rank ranks its own part of the vocabulary. What travels between ranks is ``cap`` candidates and one
log-sum-exp a row, never a row of logits. The arithmetic below needs torch alone; only ``CandidateHead``
knows how SGLang stores a head.
"""

from typing import Any, NamedTuple

import torch

# Rows are ranked in chunks of at most this many logits, 256 MiB in float32. That bounds the memory of a large
# batch (128 requests of 15 positions over 163,840 tokens would be 1.3 GB) and lets every smaller one run at once.
MAX_CHUNK_LOGITS = 64 * 2**20

_ID_MASK = 2**31 - 1
_NO_CANDIDATE = -0x7F800001 << 32  # the key of logit -inf and of the greatest id, which no vocabulary reaches


class Candidates(NamedTuple):
    """The best tokens of each row, best first; of two with equal logits the lower id comes first."""

    ids: torch.Tensor
    """[rows, cap] int64, token ids of the whole vocabulary."""
    log_probs: torch.Tensor
    """[rows, cap] float32, natural logarithms under the softmax over the whole vocabulary."""


class ShardCandidates(NamedTuple):
    """What one rank knows of its part of the vocabulary, and all that the other ranks need."""

    keys: torch.Tensor
    """[rows, cap] int64, candidates as ``pack_keys`` makes them, in no order; unused places sort last."""
    log_sums: torch.Tensor
    """[rows] float32, log-sum-exp of the part's soft-capped logits less their largest, so that logits far from 0
    cost no precision; -inf for a part without tokens."""


def pack_keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Pack float32 logits and int64 ids below 2**31 into int64 keys of the same shape.

    A greater key is a better candidate: the higher logit, or the lower id where logits are equal. No two tokens
    share a key, so every rank, and every number of ranks, puts the same candidates into the same order.
    """
    bits = (logits + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0, which is equal but has other bits
    ordered = bits ^ ((bits >> 31) & _ID_MASK)  # negative floats order backwards when read as integers
    return (ordered.long() << 32) | (_ID_MASK - ids)


def unpack_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 logits and the int64 ids that ``pack_keys`` was given."""
    ordered = (keys >> 32).to(torch.int32)
    logits = (ordered ^ ((ordered >> 31) & _ID_MASK)).view(torch.float32)
    return logits, _ID_MASK - (keys & _ID_MASK)


def cap_logits(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return float32 ``softcap * tanh(logits / softcap)``, or the logits themselves where softcap is None."""
    logits = logits.float()
    return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)


def relative_log_sum(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return float32 log sum exp(logits - largest) [rows] of logits [rows, tokens] and their largest [rows].

    On CUDA it is SGLang's kernel, which reads the logits once and needs no float32 copy of them.
    """
    if not logits.is_cuda:
        return (logits.float() - largest.unsqueeze(-1)).exp_().sum(dim=-1).log_()
    from sglang.srt.layers.logsumexp import row_logsumexp

    return row_logsumexp(logits)[1]


def largest_logits(keys: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return the soft-capped logit of the best of candidates ``keys`` [..., cap]; -inf where there is none."""
    return cap_logits(unpack_keys(keys.amax(dim=-1))[0], softcap)


def top_candidates(logits: torch.Tensor, cap: int, first_id: int, softcap: float | None = None) -> ShardCandidates:
    """Rank one part of the vocabulary.

    Args:
        logits: [rows, tokens], scaled but not soft-capped, of the part's real tokens only (no padding).
        cap: candidates a row. Of tokens whose logits equal the last candidate's, which ones are kept is
            torch.topk's choice.
        first_id: id of the part's first token in the whole vocabulary.
        softcap: the target's final logit soft-cap. It enters the log-sum-exp only: it keeps the order, and where
            it rounds two logits to one value the order before it is the finer one.
    """
    kept = min(cap, logits.shape[-1])
    best, positions = torch.topk(logits, kept, dim=-1, sorted=False)
    keys = pack_keys(best.float(), positions + first_id)
    keys = torch.nn.functional.pad(keys, (0, cap - kept), value=_NO_CANDIDATE)
    capped = logits if softcap is None else cap_logits(logits, softcap)
    return ShardCandidates(keys, relative_log_sum(capped, largest_logits(keys, softcap)))


def merge_shards(keys: torch.Tensor, log_sums: torch.Tensor, softcap: float | None = None) -> Candidates:
    """Merge every rank's candidates.

    Args:
        keys: [ranks, rows, cap] int64. Together the ranks hold at least ``cap`` real candidates a row.
        log_sums: [ranks, rows] float32.
        softcap: as in ``top_candidates``.

    Returns:
        The ``cap`` best, with log p = softcap(logit) - log sum over ranks of exp(largest + log_sums), where largest is
        the soft-capped logit of the rank's best candidate.
    """
    ranks, rows, cap = keys.shape
    best = keys.transpose(0, 1).reshape(rows, ranks * cap).topk(cap, dim=-1).values
    logits, ids = unpack_keys(best)
    below_best = cap_logits(logits, softcap) - largest_logits(best, softcap).unsqueeze(-1)
    largest = largest_logits(keys, softcap)
    total = torch.logsumexp(largest - largest.amax(dim=0) + log_sums, dim=0)
    return Candidates(ids, below_best - total.unsqueeze(-1))


def gather_shards(shard: ShardCandidates, group: Any) -> ShardCandidates:
    """Give every rank of an SGLang GroupCoordinator all parts, stacked in rank order, in one collective.

    Returns:
        keys [ranks, rows, cap] and log_sums [ranks, rows]. The log-sum-exp travels as one more column.
    """
    sums = shard.log_sums.view(torch.int32).long().unsqueeze(-1)
    sent = torch.cat([shard.keys, sums], dim=-1)
    received = sent.new_empty(group.world_size * sent.shape[0], sent.shape[1])
    group.all_gather_into_tensor(received, sent)
    received = received.view(group.world_size, *sent.shape)
    return ShardCandidates(received[..., :-1], received[..., -1].to(torch.int32).view(torch.float32))


class CandidateHead:
    """Maps hidden states to candidates through the target's own head.

    The logits are those of the target: its LogitsProcessor makes them, in the head's dtype or in float32 as the
    server was told, for dense and quantised heads alike, and its logit scale and soft-cap are applied. (SGLang takes no
    LoRA adapters beside an algorithm of a plugin, so none is looked for.)

    A call reads nothing back to the host and its shapes follow from the input's alone, so a CUDA graph can hold it.
    All ranks of the head's group have to call together and with the same hidden states.
    """

    def __init__(self, head: Any, logits_processor: Any, cap: int):
        """Read the head's layout.

        Args:
            head: the target's ``lm_head``; a ParallelLMHead, a tied VocabParallelEmbedding, or any other layer that
                holds the whole vocabulary on every rank.
            logits_processor: the target's LogitsProcessor.
            cap: candidates a row.

        Raises:
            ValueError: the head cannot serve candidates, or ``cap`` is not in 1 to the vocabulary's size.
        """
        self._head = getattr(head, "base_layer", head)
        _require_supported(self._head, logits_processor)
        self._logits_processor = logits_processor
        self._scale = _positive_scale(logits_processor.logit_scale)
        self._softcap = logits_processor.final_logit_softcapping or None
        self.vocab_size = int(logits_processor.vocab_size)
        self._first_id = 0
        self._num_tokens = self.vocab_size
        self._group = None
        if hasattr(self._head, "shard_indices"):
            self.vocab_size = min(self.vocab_size, int(self._head.org_vocab_size))
            shard = self._head.shard_indices
            self._first_id = int(shard.org_vocab_start_index)
            self._num_tokens = max(0, min(int(shard.org_vocab_end_index), self.vocab_size) - self._first_id)
            self._group = self._head.tp_group if self._head.tp_size > 1 else None
        if not 1 <= cap <= self.vocab_size:
            raise ValueError(
                f"--speculative-ddtree-topk-cap {cap}: the target's vocabulary has {self.vocab_size} tokens; "
                f"give a cap from 1 to {self.vocab_size}"
            )
        self.cap = cap
        self._chunk_rows = max(1, MAX_CHUNK_LOGITS // max(1, self._num_tokens))

    def __call__(self, hidden: torch.Tensor) -> Candidates:
        """Return the candidates of hidden states [rows, hidden size], equal on all ranks of the head's group."""
        if hidden.shape[0] == 0:
            return Candidates(
                hidden.new_empty((0, self.cap), dtype=torch.int64),
                hidden.new_empty((0, self.cap), dtype=torch.float32),
            )
        chunks = [
            top_candidates(self._local_logits(rows), self.cap, self._first_id, self._softcap)
            for rows in torch.split(hidden, self._chunk_rows)
        ]
        shard = ShardCandidates(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        if self._group is None:
            return merge_shards(shard.keys.unsqueeze(0), shard.log_sums.unsqueeze(0), self._softcap)
        return merge_shards(*gather_shards(shard, self._group), self._softcap)

    def _local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's scaled logits [rows, tokens] without the head's padding."""
        logits = self._logits_processor._compute_lm_head(hidden, self._head)[:, : self._num_tokens]
        return logits if self._scale is None else logits.mul_(self._scale)


def _positive_scale(logit_scale: Any) -> float | None:
    """Return the target's logit scale, None where it has none.

    Raises:
        ValueError: the scale is not above 0, so that it turns the order of the tokens round.
    """
    if logit_scale is None:
        return None
    scale = float(logit_scale)
    if not scale > 0:
        raise ValueError(f"DDTREE needs a target whose logit scale is above 0, it is {scale}; check its config.json")
    return scale


def _require_supported(head: Any, logits_processor: Any) -> None:
    """Raise ValueError, naming the remedy, for a head that cannot serve candidates."""
    name = type(head).__name__
    if not callable(getattr(logits_processor, "_compute_lm_head", None)):
        raise ValueError(
            f"DDTREE needs a target with SGLang's LogitsProcessor, it has {type(logits_processor).__name__}; "
            "serve this model with --speculative-algorithm DFLASH or without speculation"
        )
    if not hasattr(head, "weight") and not callable(getattr(getattr(head, "quant_method", None), "apply", None)):
        raise ValueError(
            f"DDTREE needs the target's lm_head, with a weight or a quantisation method; {name} has neither. "
            "Serve this model without speculation"
        )
    if not hasattr(head, "shard_indices"):
        if logits_processor.do_tensor_parallel_all_gather:
            raise ValueError(
                f"DDTREE cannot tell which tokens each rank of the target's {name} holds, for it has no shard_indices; "
                "use --tp-size 1"
            )
        return
    if head.num_embeddings != head.org_vocab_size:
        raise ValueError(
            f"DDTREE cannot draft from the {head.num_embeddings - head.org_vocab_size} tokens added to the target's "
            f"vocabulary of {head.org_vocab_size}; serve a model whose own vocabulary has them"
        )
    if head.tp_size > 1 and logits_processor.do_tensor_parallel_all_gather_dp_attn and not head.use_attn_tp_group:
        raise ValueError(
            "DDTREE cannot use an lm_head that is split over data-parallel ranks, for each has rows of its own; "
            "add --enable-dp-lm-head"
        )
