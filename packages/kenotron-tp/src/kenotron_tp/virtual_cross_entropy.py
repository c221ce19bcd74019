"""The output layer and the cross entropy in virtual shards: the same bits on every number of ranks.

Logits exist for a few tokens and one virtual shard at a time; backward computes them once more.

Shapes: T tokens, I input features, V vocabulary; n virtual shards, k = n/t of them on a rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import Axis, all_gather
from kenotron_tp.autocast import outside_autocast
from kenotron_tp.fused_cross_entropy import Chunked, added
from kenotron_tp.logit_cap import cap_slope, capped_logits
from kenotron_tp.products import product
from kenotron_tp.softmax import (
    SoftmaxStatistics,
    Terms,
    joined_statistics,
    local_statistics,
    losses,
    write_gradient,
)
from kenotron_tp.virtual_shards import OwnChunk, shards_of, sum_of_shards

_CHUNK = 1024
"""Tokens at a time: the same on every layout, or products would have other shapes."""


class _VocabularyShard(NamedTuple):
    """A virtual rank's part of the vocabulary."""

    weight: Tensor
    """(V/n, I)"""
    terms: Terms


def virtual_losses(
    x: Tensor, weight: Tensor, labels: Tensor, how: Chunked, shards: int
) -> tuple[Tensor, Tensor]:
    """Losses and z-losses (T,) of x (T, I), which is whole, and weight (V/t, I).

    One all-gather of five numbers a token and a virtual shard in forward, and an all-reduce of
    every chunk's gradient in backward. ``shards``: n.
    """
    return _VirtualLosses.apply(x, weight, labels, how._replace(chunk=_CHUNK), shards)


def virtual_logits(
    x: Tensor, weight: Tensor, axis: Axis, shards: int, cap: float | None = None
) -> Tensor:
    """Return logits (T, V/t) of x (T, I), which is whole, and weight (V/t, I); no gradients.

    ``axis``: tp; ``shards``: n; ``cap``: see ``capped_logits``.
    """
    parts = shards_of(weight.detach(), 0, [OwnChunk(len(weight))], shards // axis.size, axis)
    return torch.cat([capped_logits(product(x.detach(), each.t()), cap) for each in parts], 1)


class _VirtualLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, how: Chunked, shards: int
    ) -> tuple[Tensor, Tensor]:
        own = _own_shards(weight, how.terms, shards)
        rows = [
            torch.cat([_read(x[i], labels[i], s, how) for i in _slices(x, how)], 1) for s in own
        ]
        gathered = all_gather(torch.stack(rows), how.terms.axis)  # (n, 5, T)
        found = joined_statistics(gathered, len(own[0].weight), how.terms)
        ctx.save_for_backward(x, weight, labels, *found)
        ctx.how, ctx.shards = how, shards
        loss, z = losses(found, labels, how.terms)
        ctx.mark_non_differentiable(z)
        return loss, z

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        (x, weight, labels, *found), how = ctx.saved_tensors, ctx.how
        own, dx = _own_shards(weight, how.terms, ctx.shards), torch.empty_like(x)
        sums: list[Tensor | None] = [None] * len(own)
        for i in _slices(x, how):
            of, parts = SoftmaxStatistics(*(each[i] for each in found)), []
            for place, shard in enumerate(own):
                logits = _logits_gradient(x[i], labels[i], of, grads[0][i], shard, how)
                parts.append(product(logits, shard.weight))
                sums[place] = added(sums[place], logits, x[i], last=i.stop >= len(x))
            dx[i] = sum_of_shards(parts, how.terms.axis)
        dw = torch.cat(
            [torch.zeros_like(s.weight) if w is None else w for w, s in zip(sums, own, strict=True)]
        )
        return dx, dw.to(weight.dtype), None, None, None


def _own_shards(weight: Tensor, terms: Terms, shards: int) -> list[_VocabularyShard]:
    """Return this rank's virtual shards of the output layer."""
    count, ranks = shards // terms.axis.size, tuple(range(shards))
    first = terms.axis.rank * count
    parts = shards_of(weight.detach(), 0, [OwnChunk(len(weight))], count, terms.axis)
    return [
        _VocabularyShard(part, terms._replace(axis=Axis(terms.axis.name, first + i, ranks)))
        for i, part in enumerate(parts)
    ]


def _slices(x: Tensor, how: Chunked) -> list[slice]:
    return [slice(start, start + how.chunk) for start in range(0, max(len(x), 1), how.chunk)]


def _read(x: Tensor, labels: Tensor, shard: _VocabularyShard, how: Chunked) -> Tensor:
    """Return the statistics (5, T) of a virtual shard's logits."""
    logits = capped_logits(product(x, shard.weight.t()), how.cap)
    return local_statistics(logits, labels, shard.terms)


def _logits_gradient(
    x: Tensor,
    labels: Tensor,
    of: SoftmaxStatistics,
    grad: Tensor,
    shard: _VocabularyShard,
    how: Chunked,
) -> Tensor:
    """Return the gradient of a virtual shard's logits (T, V/n)."""
    logits = capped_logits(product(x, shard.weight.t()), how.cap)
    slope = None if how.cap is None else cap_slope(logits, how.cap)
    write_gradient(logits, logits, labels, of, grad, shard.terms)
    return logits if slope is None else logits.mul_(slope)
