"""The target as a teacher: a bf16 forward over whole sequences at once, for the data the drafter learns from.

It is not bit-identical to the engine's forward, and need not be: nothing here decides a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree_reference import assets, gguf, model, toy
from ddtree_reference.assets import ModelName
from ddtree_reference.linear import Linear
from ddtree_reference.model import Config, Target

MAX_CONTEXT = 2048


@dataclass(frozen=True)
class Layer:
    """bf16 weights of one layer, [out, in]: `qkv` is q, k and v stacked, `gate_up` gate and up; norms are fp32."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    ffn_norm: Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's plain weights. `cos` and `sin` are fp32 [positions, head_dim]."""

    config: Config
    embedding: Tensor  # bf16 [vocab, dim]
    head: Tensor  # bf16 [vocab, dim]
    norm: Tensor
    layers: tuple[Layer, ...]
    cos: Tensor
    sin: Tensor


def load(name: ModelName) -> Teacher:
    """Load the target's weights. Raises FileNotFoundError if they are not installed."""
    if name == "toy":
        return of_target(toy.build_target("fp32", MAX_CONTEXT))
    return of_target(model.from_gguf(gguf.read(assets.weight_files(name)["model"]), "fp32", MAX_CONTEXT))


def of_target(target: Target) -> Teacher:
    """The teacher that has an fp32 target's weights."""
    config = target.config

    def matrix(weight: Linear) -> Tensor:
        return torch.cat(weight.pieces, 1).bfloat16()

    def layer(source: model.Layer) -> Layer:
        q, k, v = torch.split(matrix(source.qkv), [heads * config.head_dim for heads in _heads(config)])
        return Layer(
            qkv=torch.cat([_halves(q, config.head_dim), _halves(k, config.head_dim), v]),
            out=matrix(source.out),
            gate_up=matrix(source.gate_up),
            down=matrix(source.down),
            attention_norm=source.attention_norm,
            ffn_norm=source.ffn_norm,
        )

    embedding = target.embedding.bfloat16()
    head = embedding if target.head is target.embedding else target.head.bfloat16()
    cos, sin = rope_table(config.head_dim, MAX_CONTEXT + model.ROPE_MARGIN, config.rope_base)
    return Teacher(config, embedding, head, target.norm, tuple(layer(source) for source in target.layers), cos, sin)


def _heads(config: Config) -> tuple[int, int, int]:
    return config.n_heads, config.n_kv_heads, config.n_kv_heads


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """The target rotates neighbouring coordinates of a head; reordered so that halves are rotated."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def rope_table(head_dim: int, positions: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embedding in the half-rotation layout, fp32 [positions, head_dim] each."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the half-rotation layout: x [..., head_dim] with tables that broadcast to it."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in x's type."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


@torch.inference_mode()
def forward(teacher: Teacher, tokens: Tensor, feature_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run sequences `tokens` [B, S], padded on the right: no real row sees padding.

    Returns the hidden states after the final norm, bf16 [B, S, dim], and those after `feature_layers` side by side,
    bf16 [B, S, len * dim].
    """
    config = teacher.config
    batch, length = tokens.shape
    n_rotated = config.n_heads + config.n_kv_heads
    cos, sin = (table[:length, None].bfloat16() for table in (teacher.cos, teacher.sin))  # [S, 1, head_dim]
    x = teacher.embedding[tokens].float()
    features = []
    for i, layer in enumerate(teacher.layers):
        h = rms_norm(x, layer.attention_norm, config.norm_eps).bfloat16()
        heads = F.linear(h, layer.qkv).view(batch, length, -1, config.head_dim)
        qk = rotate(heads[:, :, :n_rotated], cos, sin).transpose(1, 2)  # [B, heads, S, head_dim]
        q, k, v = qk[:, : config.n_heads], qk[:, config.n_heads :], heads[:, :, n_rotated:].transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x += F.linear(attended.transpose(1, 2).reshape(batch, length, -1), layer.out)
        h = rms_norm(x, layer.ffn_norm, config.norm_eps).bfloat16()
        gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
        x += F.linear(F.silu(gate) * up, layer.down)
        if i in feature_layers:
            features.append(x.bfloat16())
    return rms_norm(x, teacher.norm, config.norm_eps).bfloat16(), torch.cat(features, -1)


@torch.inference_mode()
def top_log_probs(teacher: Teacher, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable next tokens of rows `hidden` [T, dim]: ids int64 [T, k], best first, and fp32 log p."""
    logits = F.linear(hidden, teacher.head)
    best, ids = logits.topk(min(k, logits.shape[-1]), -1)
    # torch.logsumexp takes five times as long
    best = best.float()
    rest = logits.float().sub_(best[:, :1]).exp_().sum(-1, keepdim=True).log_()
    return ids, best - best[:, :1] - rest
