"""The target: a Llama forward pass over new tokens of several sequences, with numerics that make speculation lossless.

Greedy speculative decoding equals autoregressive decoding only if a row's result does not depend on which rows are
computed with it, nor on the order of the keys it attends to. In plain bf16 both do: a difference of 1e-7 flips a
rounding, grows to bf16 noise, and the text forks at the next near tie. Mixed numerics take the cause away:

* linears run in bf16, whose kernels are row-invariant for short reductions: the down projection is split into pieces of
  K <= 768, added in fp32;
* rope and attention run in fp64 over an fp64 KV cache: the order of its sums is all but never seen after the cast back;
* residual stream and norms are fp32;
* the next token is the best of the 8 best bf16 logits, scored again in fp32, ties by the lower token id.

fp32 numerics (everything in fp32) are for CPUs whose bf16 kernels fail the self-test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree_reference import gguf, linear, tree
from ddtree_reference.linear import Linear

Numerics = Literal["mixed", "fp32"]

CANDIDATES = 8  # bf16 logits that are scored again
ROPE_MARGIN = 64  # positions beyond the context that drafts may stand on


@dataclass(frozen=True)
class Config:
    """Shape of a Llama model; `max_context` bounds prompt and answer together."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    rope_base: float
    norm_eps: float
    max_context: int


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: `qkv` is q, k and v stacked, `gate_up` gate and up."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    ffn_norm: Tensor


@dataclass(frozen=True)
class Target:
    """The model that decides every token. `rope` is what `rope_table` gives."""

    config: Config
    numerics: Numerics
    embedding: Tensor  # [vocab, dim]
    head: Tensor  # [vocab, dim], by rows
    packed_head: Linear
    norm: Tensor
    layers: tuple[Layer, ...]
    rope: Tensor


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a batch: `rows` new tokens behind the `start` that are in its region at `base`.

    Each row sees all `start` tokens and, of the new ones, what the additive `mask` says ([group * rows, start + rows],
    see `attention_mask`; None for one row).
    """

    base: int
    start: int
    rows: int
    mask: Tensor | None


def weight_dtype(numerics: Numerics) -> torch.dtype:
    """The type linears are computed in."""
    return torch.bfloat16 if numerics == "mixed" else torch.float32


def kv_dtype(numerics: Numerics) -> torch.dtype:
    """The type of the KV cache, which attention is computed in."""
    return torch.float64 if numerics == "mixed" else torch.float32


def rope_table(head_dim: int, positions: int, base: float, rotated: int, plain: int, dtype: torch.dtype) -> Tensor:
    """Rotary embedding as factors of complex numbers, [positions, rotated + plain heads, head_dim / 2].

    A head's neighbouring coordinates are the real and imaginary part of one number. The `plain` heads (values, which
    are not rotated) get the factor 1, so that one product serves queries, keys and values.
    """
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None].repeat(1, rotated + plain, 1)
    turns[:, rotated:] = 1
    return turns.to(torch.complex128 if dtype == torch.float64 else torch.complex64)


def assemble(
    config: Config, numerics: Numerics, embedding: Tensor, head: Tensor, norm: Tensor, layers: Sequence[Layer]
) -> Target:
    """Put a target together; the rope table reaches beyond the context, where tree nodes may stand."""
    positions, heads = config.max_context + ROPE_MARGIN, config.n_heads + config.n_kv_heads
    rope = rope_table(config.head_dim, positions, config.rope_base, heads, config.n_kv_heads, kv_dtype(numerics))
    return Target(config, numerics, embedding, head, linear.pack(head), norm, tuple(layers), rope)


def from_gguf(file: gguf.GGUF, numerics: Numerics, max_context: int) -> Target:
    """Load a Llama from GGUF with tied embeddings. Raises ValueError for another architecture."""
    meta = file.metadata
    if meta["general.architecture"] != "llama":
        raise ValueError(f"{file.path}: architecture {meta['general.architecture']!r}; only 'llama' is supported")
    dim, n_heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    config = Config(
        n_layers=meta["llama.block_count"],
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=meta["llama.attention.head_count_kv"],
        head_dim=dim // n_heads,
        hidden_dim=meta["llama.feed_forward_length"],
        vocab_size=meta["llama.vocab_size"],
        rope_base=meta["llama.rope.freq_base"],
        norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        max_context=max_context,
    )
    if config.dim > linear.PIECE:
        raise ValueError(f"{file.path}: width {config.dim}; models of up to {linear.PIECE} are supported")
    dtype = weight_dtype(numerics)

    def layer(i: int) -> Layer:
        def weight(name: str) -> Tensor:
            return gguf.load(file, f"blk.{i}.{name}.weight", dtype)

        return Layer(
            qkv=linear.pack(torch.cat([weight("attn_q"), weight("attn_k"), weight("attn_v")])),
            out=linear.pack(weight("attn_output")),
            gate_up=linear.pack(torch.cat([weight("ffn_gate"), weight("ffn_up")])),
            down=linear.pack(weight("ffn_down")),
            attention_norm=gguf.load(file, f"blk.{i}.attn_norm.weight"),
            ffn_norm=gguf.load(file, f"blk.{i}.ffn_norm.weight"),
        )

    embedding = gguf.load(file, "token_embd.weight", dtype)
    norm = gguf.load(file, "output_norm.weight")
    return assemble(config, numerics, embedding, embedding, norm, [layer(i) for i in range(config.n_layers)])


def new_cache(target: Target, slots: int) -> Tensor:
    """Room for keys and values, [layers, slots, 2 * kv heads, head_dim]: a slot's keys first, then its values.

    Uninitialised, because only written slots are read; the system gives memory to pages as they are written.
    """
    config = target.config
    shape = (config.n_layers, slots, 2 * config.n_kv_heads, config.head_dim)
    return torch.empty(shape, dtype=kv_dtype(target.numerics))


def attention_mask(target: Target, visible: Tensor, start: int) -> Tensor:
    """The additive mask of a span whose rows see all `start` cached slots and, of each other, `visible`.

    `visible` is bool [T, T]; the mask is [T * heads per kv head, start + T] in the KV cache's type.
    """
    rows = visible.shape[0]
    mask = torch.zeros(rows, start + rows, dtype=kv_dtype(target.numerics))
    mask[:, start:].masked_fill_(~visible, float("-inf"))
    return mask.repeat(target.config.n_heads // target.config.n_kv_heads, 1)


def tree_span(target: Target, base: int, start: int, parents: Sequence[int]) -> Span:
    """The span of a tree's nodes behind `start` tokens: each sees those, its ancestors and itself."""
    if len(parents) == 1:
        return Span(base, start, 1, None)
    visible = torch.from_numpy(tree.visibility(parents))  # [nodes, nodes]
    return Span(base, start, len(parents), attention_mask(target, visible, start))


def causal_span(target: Target, base: int, start: int, rows: int) -> Span:
    """The span of `rows` tokens that follow each other behind `start` others."""
    return tree_span(target, base, start, range(-1, rows - 1))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x [T, heads, head_dim] times its rows of a rope table [T, heads, head_dim / 2]."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rope).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Root-mean-square norm of fp32 x over the last axis, cast to `dtype`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps).to(dtype)


def slots_of(spans: Sequence[Span]) -> Tensor:
    """The slots that the rows of `spans` are written to, [T]."""
    if len(spans) == 1:
        first = spans[0].base + spans[0].start
        return torch.arange(first, first + spans[0].rows)
    return torch.tensor([span.base + span.start + row for span in spans for row in range(span.rows)])


@torch.inference_mode()
def forward(
    target: Target,
    cache: Tensor,
    tokens: Tensor,
    positions: Tensor,
    spans: Sequence[Span],
    feature_layers: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None]:
    """Run `tokens` [T] at `positions` [T], the rows of `spans` one after another, and write their keys and values.

    Returns the hidden state before the final norm, fp32 [T, dim], and the hidden states after `feature_layers` side by
    side in the weights' type, [T, len * dim] (None if there are none).
    """
    config = target.config
    dtype = target.embedding.dtype
    rope, slots = target.rope[positions], slots_of(spans)
    x = target.embedding[tokens].float()  # [T, dim]
    features = []
    for i, layer in enumerate(target.layers):
        qkv = linear.apply(layer.qkv, rms_norm(x, layer.attention_norm, config.norm_eps, dtype))
        qkv = rotate(qkv.to(cache.dtype).view(len(x), -1, config.head_dim), rope)  # [T, heads + 2 kv, head_dim]
        cache[i].index_copy_(0, slots, qkv[:, config.n_heads :])
        linear.add_to(x, layer.out, _attend(config, cache[i], qkv, spans, dtype))
        gate, up = linear.apply(layer.gate_up, rms_norm(x, layer.ffn_norm, config.norm_eps, dtype)).chunk(2, -1)
        linear.add_to(x, layer.down, F.silu(gate) * up)
        if i in feature_layers:
            features.append(x.to(dtype, copy=True))
    return x, torch.cat(features, -1) if features else None


def _attend(config: Config, cache: Tensor, qkv: Tensor, spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
    """Attention of the queries in qkv [T, heads + 2 kv, head_dim] over one layer's cache: [T, heads * head_dim]."""
    out, row = [], 0
    for span in spans:
        seen = cache[span.base : span.base + span.start + span.rows]
        queries = qkv[row : row + span.rows, : config.n_heads]
        out.append(attend(queries, seen, span.mask).to(dtype).flatten(1))
        row += span.rows
    return torch.cat(out) if len(out) > 1 else out[0]


def attend(q: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q [T, heads, head_dim] over slots [S, 2 * kv heads, head_dim]: [T, heads, head_dim].

    The heads of one kv head are laid out as further rows, so that each key and value is read once.
    """
    n_rows, n_heads, head_dim = q.shape
    kv_heads = seen.shape[1] // 2
    k, v = seen.transpose(0, 1).unsqueeze(0).chunk(2, 1)  # [1, kv, S, head_dim]
    if n_rows == 1:
        out = F.scaled_dot_product_attention(q.view(1, kv_heads, -1, head_dim), k, v, mask)
        return out.view(1, n_heads, head_dim)
    grouped = q.view(n_rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, mask)
    return out.view(n_heads, n_rows, head_dim).transpose(0, 1)


@torch.inference_mode()
def logits(target: Target, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, vocab] and the normed hidden state they come from [T, dim], both in the weights' type."""
    normed = rms_norm(hidden, target.norm, target.config.norm_eps, target.head.dtype)
    return linear.apply(target.packed_head, normed), normed


@torch.inference_mode()
def rescore(target: Target, scores: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of each row's best bf16 logits, ascending, and their fp32 scores, [T, 8] each: bf16 logits tie often."""
    candidates = scores.topk(CANDIDATES, -1).indices.sort(-1).values
    return candidates, (target.head[candidates].float() * normed.float()[:, None]).sum(-1)


@torch.inference_mode()
def pick(target: Target, scores: Tensor, normed: Tensor) -> list[int]:
    """The greedy token of each row, given what `logits` returns."""
    if target.numerics == "mixed":
        candidates, rescored = rescore(target, scores, normed)  # argmax takes the lowest id of equals
        chosen = candidates.gather(-1, rescored.argmax(-1, keepdim=True))[:, 0]
    else:
        chosen = scores.argmax(-1)
    return [int(token) for token in chosen.tolist()]
