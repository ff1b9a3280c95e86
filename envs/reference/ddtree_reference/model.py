"""The target: a Llama forward pass over the new tokens of one sequence, with numerics that make speculation lossless.

Greedy speculative decoding equals autoregressive decoding only if a row's result does not depend on how many rows
are computed with it, nor on the order of the keys it attends to. In plain bf16 both do: a difference of 1e-7 flips a
rounding, grows to bf16 noise, and the text forks at the next near tie. Mixed numerics take the cause away:

* linears run in bf16, whose kernels are row-invariant for short reductions: the down projection is split into pieces of
  K <= 768, added in fp32;
* attention runs in fp64 over an fp64 KV cache: the order of its sums is lost in the cast back;
* residual stream, norms and rope are fp32;
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

from ddtree_reference import gguf

Numerics = Literal["mixed", "fp32"]

DOWN_SPLIT = 512  # K of one piece of the down projection
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
    """Weights of one layer, [out, in]: `qkv` is q, k and v stacked, `gate_up` gate and up, `down` pieces along K."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: tuple[Tensor, ...]
    attention_norm: Tensor
    ffn_norm: Tensor


@dataclass(frozen=True)
class Target:
    """The model that decides every token. `cos` and `sin` are [positions, head_dim]."""

    config: Config
    numerics: Numerics
    embedding: Tensor  # [vocab, dim]
    head: Tensor  # [vocab, dim]
    norm: Tensor
    layers: tuple[Layer, ...]
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one sequence, [layers, kv_heads, slots, head_dim]; allocated once, written in place."""

    k: Tensor
    v: Tensor


def weight_dtype(numerics: Numerics) -> torch.dtype:
    """The type linears are computed in."""
    return torch.bfloat16 if numerics == "mixed" else torch.float32


def rope_table(head_dim: int, positions: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embedding in the half-rotation layout, fp32 [positions, head_dim] each."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def assemble(
    config: Config, numerics: Numerics, embedding: Tensor, head: Tensor, norm: Tensor, layers: Sequence[Layer]
) -> Target:
    """Put a target together; the rope table reaches beyond the context, where tree nodes may stand."""
    cos, sin = rope_table(config.head_dim, config.max_context + ROPE_MARGIN, config.rope_base)
    return Target(config, numerics, embedding, head, norm, tuple(layers), cos, sin)


def split_down(down: Tensor) -> tuple[Tensor, ...]:
    """The down projection [dim, hidden] in pieces along K."""
    return tuple(piece.contiguous() for piece in torch.split(down, DOWN_SPLIT, 1))


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
    dtype = weight_dtype(numerics)

    def half_rotation(weight: Tensor) -> Tensor:
        # GGUF interleaves the two halves of each head of q and k; the rope here rotates halves
        return weight.view(-1, config.head_dim // 2, 2, dim).transpose(1, 2).reshape(-1, dim)

    def layer(i: int) -> Layer:
        def weight(name: str) -> Tensor:
            return gguf.load(file, f"blk.{i}.{name}.weight", dtype)

        return Layer(
            qkv=torch.cat([half_rotation(weight("attn_q")), half_rotation(weight("attn_k")), weight("attn_v")]),
            out=weight("attn_output"),
            gate_up=torch.cat([weight("ffn_gate"), weight("ffn_up")]),
            down=split_down(weight("ffn_down")),
            attention_norm=gguf.load(file, f"blk.{i}.attn_norm.weight"),
            ffn_norm=gguf.load(file, f"blk.{i}.ffn_norm.weight"),
        )

    embedding = gguf.load(file, "token_embd.weight", dtype)
    norm = gguf.load(file, "output_norm.weight")
    return assemble(config, numerics, embedding, embedding, norm, [layer(i) for i in range(config.n_layers)])


def new_cache(target: Target, slots: int) -> KVCache:
    """An empty KV cache; pages are only touched as they are written."""
    config = target.config
    dtype = torch.float64 if target.numerics == "mixed" else torch.float32
    shape = (config.n_layers, config.n_kv_heads, slots, config.head_dim)
    return KVCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def attention_mask(target: Target, visible: Tensor, start: int) -> Tensor:
    """The additive mask of `forward` for new rows that see all `start` cached slots and, of each other, `visible`.

    `visible` is bool [T, T]; the mask is [T * heads per kv head, start + T] in the KV cache's type.
    """
    rows = visible.shape[0]
    dtype = torch.float64 if target.numerics == "mixed" else torch.float32
    mask = torch.zeros(rows, start + rows, dtype=dtype)
    mask[:, start:].masked_fill_(~visible, float("-inf"))
    return mask.repeat(target.config.n_heads // target.config.n_kv_heads, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [heads, T, head_dim] with tables [T, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 x [T, in] through weight [out, in], computed in the weight's type: fp32 [T, out]."""
    return F.linear(x.to(weight.dtype), weight).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@torch.inference_mode()
def forward(
    target: Target,
    cache: KVCache,
    tokens: Tensor,
    positions: Tensor,
    start: int,
    mask: Tensor | None,
    feature_layers: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None]:
    """Run `tokens` [T] at `positions` [T], writing their keys and values to slots start .. start + T - 1.

    `mask` is what `attention_mask` gives, None for T = 1. Returns the hidden state before the final norm, fp32
    [T, dim], and the hidden states after `feature_layers` side by side, fp32 [T, len * dim] (None if there are none).
    """
    config = target.config
    n_rows, end = tokens.shape[0], start + tokens.shape[0]
    n_rotated = config.n_heads + config.n_kv_heads
    n_qk = n_rotated * config.head_dim
    cos, sin = target.cos[positions], target.sin[positions]  # [T, head_dim]
    x = target.embedding[tokens].float()  # [T, dim]
    features = []
    for i, layer in enumerate(target.layers):
        qkv = linear(rms_norm(x, layer.attention_norm, config.norm_eps), layer.qkv)  # [T, (heads + 2 kv) * head_dim]
        qk = rotate(qkv[:, :n_qk].view(n_rows, n_rotated, config.head_dim).transpose(0, 1), cos, sin)
        v = qkv[:, n_qk:].view(n_rows, config.n_kv_heads, config.head_dim).transpose(0, 1)
        cache.k[i, :, start:end] = qk[config.n_heads :]
        cache.v[i, :, start:end] = v
        x = x + linear(_attend(target, cache, i, qk[: config.n_heads], end, mask), layer.out)
        gate, up = linear(rms_norm(x, layer.ffn_norm, config.norm_eps), layer.gate_up).chunk(2, -1)
        x = x + _down(F.silu(gate) * up, layer.down)
        if i in feature_layers:
            features.append(x)
    return x, torch.cat(features, -1) if features else None


def _attend(target: Target, cache: KVCache, i: int, q: Tensor, end: int, mask: Tensor | None) -> Tensor:
    """Attention of q [heads, T, head_dim] over the first `end` slots of layer i: fp32 [T, heads * head_dim].

    The heads of one kv head are laid out as further rows, so that each key and value is read once.
    """
    config = target.config
    rows = q.to(cache.k.dtype).reshape(1, config.n_kv_heads, -1, config.head_dim)  # [1, kv, group * T, head_dim]
    out = F.scaled_dot_product_attention(rows, cache.k[None, i, :, :end], cache.v[None, i, :, :end], mask)
    return out.view(q.shape).transpose(0, 1).reshape(q.shape[1], -1).float()


def _down(x: Tensor, pieces: tuple[Tensor, ...]) -> Tensor:
    """The down projection of x [T, hidden], piece by piece along K, added in fp32 in a fixed order: [T, dim]."""
    out = linear(x[:, :DOWN_SPLIT], pieces[0])
    for n, piece in enumerate(pieces[1:], 1):
        out += linear(x[:, n * DOWN_SPLIT : (n + 1) * DOWN_SPLIT], piece)
    return out


@torch.inference_mode()
def logits(target: Target, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, vocab] in the weights' type, and the normed hidden state they come from, fp32 [T, dim]."""
    normed = rms_norm(hidden, target.norm, target.config.norm_eps)
    return F.linear(normed.to(target.head.dtype), target.head), normed


@torch.inference_mode()
def choose(target: Target, hidden: Tensor) -> list[int]:
    """The greedy next token of each row of `hidden` [T, dim]."""
    return pick(target, *logits(target, hidden))


@torch.inference_mode()
def rescore(target: Target, scores: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of each row's best bf16 logits, ascending, and their fp32 scores, [T, 8] each: bf16 logits tie often."""
    candidates = scores.topk(CANDIDATES, -1).indices.sort(-1).values
    normed = normed.to(target.head.dtype).float()
    return candidates, (target.head[candidates].float() * normed[:, None]).sum(-1)


@torch.inference_mode()
def pick(target: Target, scores: Tensor, normed: Tensor) -> list[int]:
    """The greedy token of each row, given what `logits` returns."""
    if target.numerics == "mixed":
        candidates, rescored = rescore(target, scores, normed)  # argmax takes the lowest id of equals
        chosen = candidates.gather(-1, rescored.argmax(-1, keepdim=True))[:, 0]
    else:
        chosen = scores.argmax(-1)
    return [int(token) for token in chosen.tolist()]
