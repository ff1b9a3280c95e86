"""The drafter as a trainable network: many blocks of several sequences in one pass, weights named as in its file.

The maths is that of `ddtree_reference.drafter`: keys and values from the projected features of the tokens before the
anchor and from the block itself, attention inside a block not causal (DFlash, https://github.com/z-lab/dflash).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree_reference.drafter import Config
from ddtree_training.teacher import Teacher, rms_norm, rotate

LAYER_MATRICES = ("q", "kv", "out", "gate_up", "down")


class Layer(nn.Module):
    """Weights of one layer, fp32 [out, in]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, hidden = config.dim, config.hidden_dim
        self.q = _matrix(config.n_heads * config.head_dim, dim)
        self.kv = _matrix(2 * config.n_kv_heads * config.head_dim, dim)
        self.out = _matrix(dim, config.n_heads * config.head_dim)
        self.gate_up = _matrix(2 * hidden, dim)
        self.down = _matrix(dim, hidden)
        self.attention_norm = nn.Parameter(torch.ones(dim))
        self.ffn_norm = nn.Parameter(torch.ones(dim))


class Network(nn.Module):
    """The drafter's weights in fp32, and its pass in `compute` (the linears' type)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, cos: Tensor, sin: Tensor, compute: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        self.fc = _matrix(config.dim, len(config.feature_layers) * config.dim)
        self.context_norm = nn.Parameter(torch.ones(config.dim))
        self.mask_embedding = nn.Parameter(torch.zeros(config.dim))
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.n_layers)])
        self.norm = nn.Parameter(torch.ones(config.dim))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, features: Tensor, anchors: Tensor, embedded: Tensor, block: int) -> Tensor:
        """Normed hidden states of the masks of A blocks a sequence, [B, A, block - 1, dim], in the compute type.

        `features` are those of the sequences' first tokens, [B, S, features * dim]; `anchors` the positions of the
        blocks' first tokens, [B, A], at most S each; `embedded` those tokens' embeddings, [B, A, dim].
        """
        config = self.config
        context = self._norm(F.linear(features.to(self.compute), self._cast(self.fc)), self.context_norm)
        x = self.mask_embedding.expand(*anchors.shape, block, -1).clone()  # [B, A, block, dim]
        x[:, :, 0] = embedded.float()
        positions = anchors[:, :, None] + torch.arange(block)
        table, context_table = self._rope(positions), self._rope(torch.arange(features.shape[1])[None])
        hidden = _hidden_context(anchors, features.shape[1], self.compute)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            kv = self._cast(layer.kv)
            h = self._norm(x, layer.attention_norm)
            seen = self._project_kv(context, kv, context_table)
            own = self._project_kv(h, kv, table)
            if i == config.n_layers - 1:  # nobody reads the anchors' rows any more
                x, h, table = x[:, :, 1:], h[:, :, 1:], self._rope(positions[:, :, 1:])
            q = F.linear(h, self._cast(layer.q)).view(*h.shape[:3], config.n_heads, config.head_dim)
            attended = attend(rotate(q.float(), *table).to(self.compute), seen, own, hidden)
            x = x + F.linear(attended, self._cast(layer.out))
            gate, up = F.linear(self._norm(x, layer.ffn_norm), self._cast(layer.gate_up)).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self._cast(layer.down))
        return self._norm(x, self.norm)

    def _project_kv(self, x: Tensor, weight: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of x [..., dim]: [..., kv_heads, head_dim] each."""
        k, v = F.linear(x, weight).view(*x.shape[:-1], 2, self.config.n_kv_heads, self.config.head_dim).unbind(-3)
        return rotate(k.float(), *table).to(self.compute), v

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [...], [..., 1, head_dim] each."""
        return self.cos[positions][..., None, :], self.sin[positions][..., None, :]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.float(), weight, self.config.norm_eps).to(self.compute)

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.to(self.compute)


def initialise(network: Network, source: Teacher, seed: int) -> None:
    """Start from the target's last layers, with a context that is about the last of its features."""
    config = network.config
    random = torch.Generator().manual_seed(seed)
    n_q = config.n_heads * config.head_dim
    with torch.no_grad():
        network.fc.uniform_(-0.1, 0.1, generator=random).div_(network.fc.shape[1] ** 0.5)
        network.fc[:, -config.dim :] += torch.eye(config.dim)
        network.context_norm.copy_(source.layers[-1].attention_norm)
        network.mask_embedding.normal_(0.0, 0.02, generator=random)
        network.norm.copy_(source.norm)
        for layer, taken in zip(network.layers, source.layers[-config.n_layers :], strict=True):
            assert isinstance(layer, Layer)
            layer.q.copy_(taken.qkv[:n_q])
            layer.kv.copy_(taken.qkv[n_q:])
            for name in ("out", "gate_up", "down", "attention_norm", "ffn_norm"):
                getattr(layer, name).copy_(getattr(taken, name))


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, columns))


def _hidden_context(anchors: Tensor, n_context: int, dtype: torch.dtype) -> Tensor:
    """The additive mask [B, 1, A, 1, S] that hides a block's anchor and what follows it in the context."""
    hidden = torch.arange(n_context) >= anchors[:, None, :, None, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def attend(q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
    """Attention of blocks to their sequence's context and to themselves: [B, A, rows, heads * head_dim].

    `q` is [B, A, rows, heads, head_dim], keys and values of the context [B, S, kv_heads, head_dim], the blocks' own
    [B, A, block, kv_heads, head_dim]. Written out, because one softmax over S + block scores a row beats a fused
    kernel that has to mask the keys of all other blocks.
    """
    batch, n_blocks, n_rows, n_heads, head_dim = q.shape
    n_context, n_kv, block = context[0].shape[1], context[0].shape[2], own[0].shape[2]
    grouped = (batch * n_kv, n_blocks * n_rows * (n_heads // n_kv))  # the heads of one kv head are further rows
    by_block = (batch * n_kv * n_blocks, n_rows * (n_heads // n_kv))
    q = q.view(*q.shape[:3], n_kv, -1, head_dim).permute(0, 3, 1, 2, 4, 5).reshape(*grouped, head_dim)
    q = q * head_dim**-0.5
    context_k, context_v = (x.transpose(1, 2).reshape(-1, n_context, head_dim) for x in context)
    own_k, own_v = (x.permute(0, 3, 1, 2, 4).reshape(-1, block, head_dim) for x in own)
    before = torch.bmm(q, context_k.transpose(1, 2)).view(batch, n_kv, n_blocks, -1, n_context) + hidden
    inside = torch.bmm(q.view(*by_block, head_dim), own_k.transpose(1, 2)).view(*before.shape[:-1], block)
    weights = torch.cat([before, inside], -1).softmax(-1)
    out = torch.bmm(weights[..., :n_context].reshape(*grouped, n_context), context_v)
    out = out + torch.bmm(weights[..., n_context:].reshape(*by_block, block), own_v).view(out.shape)
    out = out.view(batch, n_kv, n_blocks, n_rows, -1, head_dim).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(batch, n_blocks, n_rows, n_heads * head_dim)
