"""The DFlash drafter: one parallel pass proposes the tokens of a whole block.

A small Llama-like stack without embedding and head of its own (it uses the target's, the head cut to the commonest
tokens). Its queries come from the block [anchor, MASK, MASK, ...], its keys and values from the block and from the
target's hidden states of all committed tokens, projected once and cached; attention inside the block is not causal.
Each row gives the distribution of the token after it, independent of the other rows' choices
(DFlash, https://github.com/z-lab/dflash).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree_reference.model import Target, linear, rms_norm, rotate, weight_dtype


@dataclass(frozen=True)
class Config:
    """Shape of a drafter. `feature_layers` are the target's layers whose outputs it reads."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    feature_layers: tuple[int, ...]
    rope_base: float
    norm_eps: float
    max_block_size: int


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, [out, in]: `kv` is k and v stacked, `gate_up` gate and up."""

    q: Tensor
    kv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    ffn_norm: Tensor


@dataclass(frozen=True)
class Drafter:
    """`vocabulary` holds the target's ids of the tokens that can be drafted, [draft vocab]."""

    config: Config
    fc: Tensor  # [dim, features * dim]
    context_norm: Tensor
    mask_embedding: Tensor  # fp32 [dim]
    layers: tuple[Layer, ...]
    norm: Tensor
    vocabulary: Tensor
    embedding: Tensor  # the target's
    head: Tensor  # [draft vocab, dim]
    cos: Tensor
    sin: Tensor


@dataclass
class Context:
    """Keys and values of the committed tokens' features, fp32 [layers, kv_heads, slots, head_dim].

    The first `length` slots are filled; the block's own keys and values go behind them and are overwritten.
    """

    k: Tensor
    v: Tensor
    length: int = 0


def new_context(drafter: Drafter, slots: int) -> Context:
    """An empty context for `slots` committed tokens and block rows."""
    config = drafter.config
    shape = (config.n_layers, config.n_kv_heads, slots, config.head_dim)
    return Context(torch.zeros(shape), torch.zeros(shape))


def assemble(config: Config, weights: dict[str, Tensor], vocabulary: Tensor, target: Target) -> Drafter:
    """Put a drafter of named fp32 weights together with the embedding and the head of its target."""
    dtype = weight_dtype(target.numerics)
    layers = tuple(
        Layer(
            **{name: weights[f"layers.{i}.{name}"].to(dtype) for name in ("q", "kv", "out", "gate_up", "down")},
            attention_norm=weights[f"layers.{i}.attention_norm"],
            ffn_norm=weights[f"layers.{i}.ffn_norm"],
        )
        for i in range(config.n_layers)
    )
    return Drafter(
        config,
        fc=weights["fc"].to(dtype),
        context_norm=weights["context_norm"],
        mask_embedding=weights["mask_embedding"],
        layers=layers,
        norm=weights["norm"],
        vocabulary=vocabulary,
        embedding=target.embedding,
        head=target.head[vocabulary].contiguous(),
        cos=target.cos,
        sin=target.sin,
    )


def _project_kv(drafter: Drafter, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated keys, and values, of x [T, dim]: fp32 [kv_heads, T, head_dim] each."""
    config = drafter.config
    k, v = linear(x, layer.kv).view(-1, 2, config.n_kv_heads, config.head_dim).permute(1, 2, 0, 3)
    return rotate(k, cos, sin), v


@torch.inference_mode()
def extend(drafter: Drafter, context: Context, features: Tensor) -> None:
    """Append the target's features of newly committed tokens, fp32 [T, features * dim], to the context."""
    start, end = context.length, context.length + features.shape[0]
    x = rms_norm(linear(features, drafter.fc), drafter.context_norm, drafter.config.norm_eps)  # [T, dim]
    cos, sin = drafter.cos[start:end], drafter.sin[start:end]
    for i, layer in enumerate(drafter.layers):
        context.k[i, :, start:end], context.v[i, :, start:end] = _project_kv(drafter, layer, x, cos, sin)
    context.length = end


@torch.inference_mode()
def propose(drafter: Drafter, context: Context, anchor: int, block_size: int) -> Tensor:
    """Logits fp32 [block_size - 1, draft vocab] of the tokens that follow `anchor`, the last committed token.

    The anchor itself has no features yet: it stands right behind the context.
    """
    config = drafter.config
    start, end = context.length, context.length + block_size
    cos, sin = drafter.cos[start:end], drafter.sin[start:end]
    x = drafter.mask_embedding.repeat(block_size, 1)  # [block, dim]
    x[0] = drafter.embedding[anchor].float()
    for i, layer in enumerate(drafter.layers):
        h = rms_norm(x, layer.attention_norm, config.norm_eps)
        q = rotate(linear(h, layer.q).view(block_size, config.n_heads, config.head_dim).transpose(0, 1), cos, sin)
        context.k[i, :, start:end], context.v[i, :, start:end] = _project_kv(drafter, layer, h, cos, sin)
        rows = q.reshape(1, config.n_kv_heads, -1, config.head_dim)  # [1, kv, group * block, head_dim]
        out = F.scaled_dot_product_attention(rows, context.k[None, i, :, :end], context.v[None, i, :, :end])
        x = x + linear(out.view(q.shape).transpose(0, 1).reshape(block_size, -1), layer.out)
        gate, up = linear(rms_norm(x, layer.ffn_norm, config.norm_eps), layer.gate_up).chunk(2, -1)
        x = x + linear(F.silu(gate) * up, layer.down)
    return linear(rms_norm(x[1:], drafter.norm, config.norm_eps), drafter.head)


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows and their fp32 scales of weight [out, in]: weight is about int8 * scale[:, None]."""
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def save(path: Path, config: Config, weights: dict[str, Tensor], vocabulary: Tensor) -> None:
    """Write named fp32 weights as safetensors: matrices as int8 with a scale a row, vectors in bf16."""
    tensors = {"vocabulary": vocabulary.to(torch.int32)}
    for name, weight in weights.items():
        if weight.dim() == 2:
            tensors[name], tensors[f"{name}.scale"] = quantise_rows(weight)
        else:
            tensors[name] = weight.to(torch.bfloat16)
    save_file(tensors, path, metadata={"config": json.dumps(asdict(config))})


def load(path: Path, target: Target) -> Drafter:
    """Read a drafter for `target`. Raises ValueError if it was made for a target of another shape."""
    with safe_open(path, framework="pt") as file:
        fields = json.loads(file.metadata()["config"])
    tensors = load_file(path)
    config = Config(**{**fields, "feature_layers": tuple(fields["feature_layers"])})
    if config.dim != target.config.dim or max(config.feature_layers) >= target.config.n_layers:
        raise ValueError(
            f"{path}: made for a target of dim {config.dim} with layer {max(config.feature_layers)}; "
            f"the target has dim {target.config.dim} and {target.config.n_layers} layers"
        )
    vocabulary = tensors.pop("vocabulary").long()
    weights = {
        name: tensor.float() * tensors[f"{name}.scale"][:, None] if tensor.dtype == torch.int8 else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith(".scale")
    }
    return assemble(config, weights, vocabulary, target)
