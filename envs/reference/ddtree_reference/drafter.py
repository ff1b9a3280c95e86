"""The DFlash drafter: one parallel pass proposes the tokens of a whole block.

A small Llama-like stack without embedding and head of its own (it uses the target's, the head cut to the commonest
tokens). Its queries come from the block [anchor, MASK, MASK, ...], its keys and values from the block and from the
target's hidden states of all committed tokens, projected once and cached; attention inside the block is not causal.
Each row gives the distribution of the token after it, independent of the other rows' choices
(DFlash, https://github.com/z-lab/dflash).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree_reference import linear
from ddtree_reference.linear import Linear
from ddtree_reference.model import Target, attend, rms_norm, rope_table, rotate, weight_dtype


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
    """Weights of one layer: `qkv` is q, k and v stacked for the block, `kv` its part for the context."""

    qkv: Linear
    kv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    ffn_norm: Tensor


@dataclass(frozen=True)
class Drafter:
    """`vocabulary` holds the target's ids of the tokens that can be drafted, [draft vocab]."""

    config: Config
    dtype: torch.dtype
    fc: Linear  # features * dim -> dim
    context_norm: Tensor
    mask_embedding: Tensor  # fp32 [dim]
    layers: tuple[Layer, ...]
    norm: Tensor
    vocabulary: Tensor
    embedding: Tensor  # the target's
    head: Linear  # dim -> draft vocab
    rope: Tensor


@dataclass(frozen=True)
class Context:
    """The committed tokens of one sequence whose features lie in slots `base` .. `base + length - 1`."""

    base: int
    length: int


def new_cache(drafter: Drafter, slots: int) -> Tensor:
    """Room for the keys and values of features and blocks, fp32 [layers, slots, 2 * kv heads, head_dim]."""
    config = drafter.config
    return torch.empty(config.n_layers, slots, 2 * config.n_kv_heads, config.head_dim)


def assemble(config: Config, weights: dict[str, Tensor], vocabulary: Tensor, target: Target) -> Drafter:
    """Put a drafter of named fp32 weights together with the embedding and the head of its target.

    The weights rotate the halves of a head (coordinate i with i + head_dim / 2); they are reordered to neighbours.
    """
    dtype = weight_dtype(target.numerics)

    def neighbours(weight: Tensor) -> Tensor:
        return weight.view(-1, 2, config.head_dim // 2, config.dim).transpose(1, 2).reshape(-1, config.dim)

    def layer(i: int) -> Layer:
        named = {name: weights[f"layers.{i}.{name}"].to(dtype) for name in ("q", "kv", "out", "gate_up", "down")}
        k, v = named["kv"].chunk(2)
        kv = torch.cat([neighbours(k), v])
        return Layer(
            qkv=linear.pack(torch.cat([neighbours(named["q"]), kv])),
            kv=linear.pack(kv),
            out=linear.pack(named["out"]),
            gate_up=linear.pack(named["gate_up"]),
            down=linear.pack(named["down"], config.hidden_dim),
            attention_norm=weights[f"layers.{i}.attention_norm"],
            ffn_norm=weights[f"layers.{i}.ffn_norm"],
        )

    fc = weights["fc"].to(dtype)
    return Drafter(
        config,
        dtype,
        fc=linear.pack(fc, fc.shape[1]),
        context_norm=weights["context_norm"],
        mask_embedding=weights["mask_embedding"],
        layers=tuple(layer(i) for i in range(config.n_layers)),
        norm=weights["norm"],
        vocabulary=vocabulary,
        embedding=target.embedding,
        head=linear.pack(target.head[vocabulary]),
        rope=rope_table(
            config.head_dim,
            target.rope.shape[0],
            config.rope_base,
            config.n_heads + config.n_kv_heads,
            config.n_kv_heads,
            torch.float32,
        ),
    )


@torch.inference_mode()
def extend(drafter: Drafter, cache: Tensor, features: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Put the target's features of newly committed tokens, [T, features * dim] in the weights' type, into `slots`."""
    config = drafter.config
    x = rms_norm(linear.apply(drafter.fc, features).float(), drafter.context_norm, config.norm_eps, drafter.dtype)
    rope = drafter.rope[positions][:, config.n_heads :]
    for layer, kept in zip(drafter.layers, cache, strict=True):
        kv = linear.apply(layer.kv, x).float().view(len(x), -1, config.head_dim)
        kept.index_copy_(0, slots, rotate(kv, rope))


@torch.inference_mode()
def propose(
    drafter: Drafter, cache: Tensor, contexts: Sequence[Context], anchors: Sequence[int], block_size: int
) -> Tensor:
    """Draft one block behind each context: hidden states [sequences * (block_size - 1), dim] in the weights' type.

    An anchor is the last committed token; it has no features yet and stands right behind the context. The state of row
    j predicts the token j + 1 places behind the anchor.
    """
    config, n_blocks = drafter.config, len(contexts)
    offsets = torch.arange(block_size)
    first = torch.tensor([[context.length, context.base + context.length] for context in contexts])
    rope = drafter.rope[(first[:, :1] + offsets).flatten()]
    slots = (first[:, 1:] + offsets).flatten()
    x = drafter.mask_embedding.repeat(n_blocks, block_size, 1)  # [sequences, block, dim]
    x[:, 0] = drafter.embedding[list(anchors)].float()
    x = x.flatten(0, 1)
    for layer, kept in zip(drafter.layers, cache, strict=True):
        h = rms_norm(x, layer.attention_norm, config.norm_eps, drafter.dtype)
        qkv = rotate(linear.apply(layer.qkv, h).float().view(len(x), -1, config.head_dim), rope)
        kept.index_copy_(0, slots, qkv[:, config.n_heads :])
        queries = torch.split(qkv[:, : config.n_heads], block_size)
        out = [
            attend(q, kept[context.base : context.base + context.length + block_size], None).flatten(1)
            for q, context in zip(queries, contexts, strict=True)
        ]
        linear.add_to(x, layer.out, torch.cat(out).to(drafter.dtype))
        gate, up = linear.apply(layer.gate_up, rms_norm(x, layer.ffn_norm, config.norm_eps, drafter.dtype)).chunk(2, -1)
        linear.add_to(x, layer.down, F.silu(gate) * up)
    x = x.view(n_blocks, block_size, -1)[:, 1:].flatten(0, 1)
    return rms_norm(x, drafter.norm, config.norm_eps, drafter.dtype)


@torch.inference_mode()
def draft_logits(drafter: Drafter, hidden: Tensor) -> Tensor:
    """Logits [T, draft vocab], fp32, of what `propose` returns."""
    return linear.apply(drafter.head, hidden).float()


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
