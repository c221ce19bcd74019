"""A Llama-like block and an LM head, whole, cut by this package and cut by torch's DTensor.

All contestants begin with the same weights. Their modules are of one class each and differ in the
linear layers that they are given, so what is compared is how these are cut.

Shapes: B batch, S sequence, T = B S tokens, n tokens of a rank, D width, H query and G kv heads, K
features of a head, F inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_dist.placement import Chunk
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, vocabulary_chunk

Turns = tuple[Tensor, Tensor]
"""Cosine and sine, each (S, 1, K/2)."""


class Shape(NamedTuple):
    """Sizes of the models and of their batch."""

    batch: int
    sequence: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        """T."""
        return self.batch * self.sequence

    @property
    def head_width(self) -> int:
        """K."""
        return self.width // self.heads

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Features of q, of k and of v."""
        kv = self.kv_heads * self.head_width
        return self.width, kv, kv


SIZES = {
    "small": Shape(8, 128, 256, 4, 2, 688, 8192),
    "medium": Shape(4, 256, 1024, 16, 4, 2752, 32768),
    "large": Shape(1, 512, 2048, 32, 8, 5504, 32768),
}


class Attention(nn.Module):
    """Causal attention of ``1/ranks`` of the heads; ``first`` is one layer for q, k, v or three."""

    def __init__(
        self, shape: Shape, ranks: int, first: Sequence[nn.Module], last: nn.Module, turns: Turns
    ) -> None:
        super().__init__()
        self.shape, self.ranks, self.turns = shape, ranks, turns
        self.first, self.last = nn.ModuleList(first), last

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) or (n, D) -> the same."""
        q, k, v = _pieces(x, self.first, [width // self.ranks for width in self.shape.qkv])
        grid = (self.shape.batch, self.shape.sequence, -1, self.shape.head_width)
        q, k, v = (part.view(grid) for part in (q, k, v))
        q, k = _rotate(q, self.turns), _rotate(k, self.turns)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.last(mixed.transpose(1, 2).reshape(self.shape.tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU; ``first`` is one layer for gate and up or two."""

    def __init__(
        self, shape: Shape, ranks: int, first: Sequence[nn.Module], last: nn.Module
    ) -> None:
        super().__init__()
        self.widths = [shape.inner // ranks] * 2
        self.first, self.last = nn.ModuleList(first), last

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) or (n, D) -> the same."""
        gate, up = _pieces(x, self.first, self.widths)
        return self.last(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm and beside a residual."""

    def __init__(self, width: int, attention: Attention, mlp: FeedForward) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, device="meta")
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width, device="meta")
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) or (n, D) -> the same."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Logits and the mean cross entropy."""

    def __init__(self, output: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.output, self.loss = output, loss

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) or (n, D) -> a scalar."""
        return self.loss(self.output(x))


class FusedHead(nn.Module):
    """Head whose logits never exist: ``loss`` takes the hidden states and the weight."""

    def __init__(self, output: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.output, self.loss = output, loss

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) or (n, D) -> a scalar."""
        return self.loss(x, self.output.weight)


def cut_block(shape: Shape, axis: Axis, turns: Turns, **how: bool) -> Block:
    """This package's: q, k, v in one layer, gate and up in one, cut by chunks. On meta.

    ``how``: ``sequence_parallel``, ``overlap``, ``regather`` of the layers.
    """
    regather = how.pop("regather", False)
    column = partial(ColumnParallelLinear, axis=axis, regather=regather, device="meta", **how)
    row = partial(RowParallelLinear, axis=axis, device="meta", **how)
    q, kv, _ = shape.qkv
    pieces = (Chunk(q), *(Chunk(kv, parts=shape.kv_heads),) * 2)
    qkv = column(shape.width, q + 2 * kv, chunks=pieces)
    attention = Attention(shape, axis.size, [qkv], row(shape.width, shape.width), turns)
    gate_up = column(shape.width, 2 * shape.inner, chunks=(Chunk(shape.inner),) * 2)
    mlp = FeedForward(shape, axis.size, [gate_up], row(shape.inner, shape.width))
    return Block(shape.width, attention, mlp)


def plain_block(shape: Shape, ranks: int, turns: Turns, fused: bool) -> Block:
    """torch's linear layers, whole; the code between them expects ``1/ranks`` of the features."""
    linear = partial(nn.Linear, bias=False, device="meta")
    qkv = [sum(shape.qkv)] if fused else shape.qkv
    first = [linear(shape.width, features) for features in qkv]
    attention = Attention(shape, ranks, first, linear(shape.width, shape.width), turns)
    gate_up = [2 * shape.inner] if fused else [shape.inner] * 2
    first = [linear(shape.width, features) for features in gate_up]
    mlp = FeedForward(shape, ranks, first, linear(shape.inner, shape.width))
    return Block(shape.width, attention, mlp)


def cut_output(shape: Shape, axis: Axis, **how: bool) -> ColumnParallelLinear:
    """This package's layer from hidden states to logits. On meta."""
    chunks = (vocabulary_chunk(shape.vocabulary, axis.size),)
    return ColumnParallelLinear(
        shape.width, shape.vocabulary, axis, chunks=chunks, device="meta", **how
    )


def plain_output(shape: Shape) -> nn.Linear:
    """torch's layer from hidden states to logits. On meta."""
    return nn.Linear(shape.width, shape.vocabulary, bias=False, device="meta")


def whole_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Values for the parameters of an uncut module, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        drawn = 1 + drawn / 10 if drawn.ndim == 1 else drawn * parameter.shape[-1] ** -0.5
        found[name] = drawn.to(device, dtype)
    return found


def torch_parts(
    whole: dict[str, Tensor], shape: Shape, ranks: int, fused: bool
) -> dict[str, Tensor]:
    """Whole fused weights or gradients as DTensor's block wants them.

    Either q, k, v, gate, up apart, or rows in an order that an even cut gives each rank its own.
    """
    widths = {"attention.first.0.weight": shape.qkv, "mlp.first.0.weight": (shape.inner,) * 2}
    found: dict[str, Tensor] = {}
    for name, value in whole.items():
        pieces = value.split(widths[name]) if name in widths else [value]
        if name not in widths:
            found[name] = value
        elif fused:
            found[name] = torch.cat([p.chunk(ranks)[r] for r in range(ranks) for p in pieces])
        else:
            found |= {name.replace("0", str(i)): piece for i, piece in enumerate(pieces)}
    return found


def turns_of(shape: Shape, device: torch.device) -> Turns:
    """Cosine and sine of the rotary angles."""
    steps = torch.arange(0, shape.head_width, 2, device=device) / shape.head_width
    positions = torch.arange(shape.sequence, device=device)
    angles = positions[:, None, None] * 10000.0**-steps
    return angles.cos(), angles.sin()


def _pieces(x: Tensor, layers: nn.ModuleList, widths: list[int]) -> Sequence[Tensor]:
    """Outputs of several layers, or the parts of a fused one's."""
    found = [layer(x) for layer in layers]
    return found if len(found) > 1 else found[0].split(widths, -1)


def _rotate(x: Tensor, turns: Turns) -> Tensor:
    """x (B, S, heads, K) turned by its position, in its dtype."""
    cos, sin = turns
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
