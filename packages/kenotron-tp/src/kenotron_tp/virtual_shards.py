"""Virtual shards: sums over tp that are the same bits on every number of ranks.

A layer is computed as n virtual ranks of tp would compute it, a power of two. Each of t ranks
computes n/t of them, one after the other, so that every product has one shape. What they add up is
added in one binary tree over all n, in fp32: first over a rank's own, then over the ranks. Zhang
et al. (TBIK, arXiv 2511.17826) do so for inference.

Shapes: ``...`` any; k = n/t virtual shards of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron_dist import Axis, all_gather, all_reduce, tree_sum, wide_tree_sum


class OwnChunk(NamedTuple):
    """A rank's part of one of the chunks that a dimension of a weight is a concatenation of."""

    size: int
    """Elements on this rank."""
    heads: int | None = None
    """Indivisible pieces on all ranks, where they are fewer than virtual shards: these share
    them. None: each virtual shard has its own part."""


def shards_of(
    weight: Tensor, dim: int, chunks: Sequence[OwnChunk], count: int, axis: Axis
) -> tuple[Tensor, ...]:
    """Return a rank's part of a weight as its virtual ranks have it: k tensors of one shape.

    The gradient of what virtual ranks share is the sum of theirs, in the tree; where it is on
    several ranks, too, backward is collective over the axis.

    Args:
        weight: (O, I) or (O,), cut along ``dim``.
        dim: 0 or 1.
        chunks: of this dimension; each is cut by itself.
        count: k.
        axis: tp.
    """
    return _CutWeight.apply(weight, dim, tuple(chunks), count, axis)


def to_shards(x: Tensor, count: int, axis: Axis) -> tuple[Tensor, ...]:
    """Return ``x``, of any shape, which all virtual ranks read, k times. Collective in backward.

    Its gradient is the sum of theirs, over those of all ranks.
    """
    return _ToShards.apply(x, count, axis)


def from_shards(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """Return the sum of tensors of any shape, k of each rank. Collective over the axis."""
    return _FromShards.apply(axis, *parts)


def sum_of_shards(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """Sum k tensors (...) of each rank in the tree: no gradients, in their dtype, rounded once.

    Sums over gloo are such a tree. NCCL adds in an order of its own: there each rank gathers.
    """
    dtype, own = parts[0].dtype, wide_tree_sum(parts)  # autograd still reads the parts
    if axis.backend == "gloo" or axis.size == 1:
        return all_reduce(own, axis).to(dtype)
    return tree_sum(all_gather(own[None], axis)).to(dtype)


class _CutWeight(torch.autograd.Function):
    """Copies, so that storage begins where kernels want it, whatever the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, dim: int, chunks: tuple[OwnChunk, ...], count: int, axis: Axis
    ) -> tuple[Tensor, ...]:
        ctx.dim, ctx.chunks, ctx.axis = dim, chunks, axis
        parts = weight.split([chunk.size for chunk in chunks], dim)
        pieces = [
            part.chunk(_own_pieces(chunk, count, axis), dim)
            for part, chunk in zip(parts, chunks, strict=True)
        ]
        return tuple(
            torch.cat([each[i * len(each) // count] for each in pieces], dim) for i in range(count)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count, dim, found = len(grads), ctx.dim, list[Tensor]()
        own = [_own_pieces(chunk, count, ctx.axis) for chunk in ctx.chunks]
        sizes = [chunk.size // n for chunk, n in zip(ctx.chunks, own, strict=True)]
        of_chunks = zip(*(grad.split(sizes, dim) for grad in grads), strict=True)
        for chunk, pieces, parts in zip(ctx.chunks, own, of_chunks, strict=True):
            each = count // pieces
            if chunk.heads is None:
                found += parts
            elif ctx.axis.size <= chunk.heads:  # shared by virtual shards of this rank alone
                alone = Axis.solo(ctx.axis.name)
                found += [sum_of_shards(parts[i : i + each], alone) for i in range(0, count, each)]
            else:
                found.append(_sum_of_sharers(parts, chunk.heads, ctx.axis))
        return torch.cat(found, dim), None, None, None, None


def _own_pieces(chunk: OwnChunk, count: int, axis: Axis) -> int:
    """Return the number of different pieces of a chunk among a rank's virtual shards."""
    return count if chunk.heads is None else max(chunk.heads // axis.size, 1)


def _sum_of_sharers(parts: Sequence[Tensor], heads: int, axis: Axis) -> Tensor:
    """Sum the gradients (...) of one head over its virtual shards on several ranks. Collective.

    Ranks of other heads add zeros, which change no bit: no groups of ranks are needed.
    """
    head = axis.rank * heads // axis.size
    zeros = torch.zeros_like(parts[0])
    rows = [torch.stack([part if i == head else zeros for i in range(heads)]) for part in parts]
    return sum_of_shards(rows, axis)[head]


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_of_shards(grads, ctx.axis), None, None


class _FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        total = sum_of_shards(parts, axis)
        return total.clone() if total is parts[0] else total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads * ctx.count
