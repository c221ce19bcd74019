"""Products of experts with the tokens of each source apart: the same bits on every number of ranks.

A source is a rank of ep. What an expert computes of a source's rows has the shape, and its operands
the alignment, that they have where there is no other rank and every expert.

Shapes: n sources, e experts of a rank, R rows, I input and O output features, F any features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_tp import product

_ALIGNED = 64
"""Bytes that the storage of a new tensor begins at a multiple of: kernels round elsewhere
differently."""


def product_by_source(
    x: Tensor, counts: Tensor, weights: Sequence[Tensor], *, transposed: bool = False
) -> Tensor:
    """Return x W_e^T for the rows of each source and expert, (R, O).

    Args:
        x: (R, I), grouped by source, then by expert.
        counts: rows of each, int64 (n, e).
        weights: (e, O, I) for each of n sources; each has the gradient of its rows alone.
        transposed: weights are (e, I, O).
    """
    return _BySource.apply(x, counts, transposed, *weights)


def each_group(function: Callable[[Tensor], Tensor], y: Tensor, counts: Tensor) -> Tensor:
    """Return a function of rows, (R, ...) -> (R, F), called with those of each group alone.

    Kernels round the last elements of a tensor differently: which these are depends on the rows.

    Args:
        function: of the rows of one group.
        y: (R, ...).
        counts: rows of each group, of any shape, int64.
    """
    if y.is_meta:
        return function(y)
    return torch.cat([function(rows) for rows in y.split(counts.flatten().tolist())])


class _BySource(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, transposed: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.transposed = transposed
        if x.is_meta:
            return x.new_empty(len(x), weights[0].shape[2 if transposed else 1])
        ctx.sizes = counts.flatten().tolist()
        pairs = zip(x.split(ctx.sizes), _matrices(weights, not transposed), strict=True)
        return torch.cat([product(_aligned(rows), w) for rows, w in pairs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (dy,), (x, *weights) = grads, ctx.saved_tensors
        if x.is_meta:
            return torch.empty_like(x), None, None, *map(torch.empty_like, weights)
        xs, dys = ([_aligned(rows) for rows in y.split(ctx.sizes)] for y in (x, dy))
        matrices = _matrices(weights, ctx.transposed)
        dx = torch.cat([product(*pair) for pair in zip(dys, matrices, strict=True)])
        pairs = zip(xs, dys, strict=True) if ctx.transposed else zip(dys, xs, strict=True)
        dw = [product(left.t(), right) for left, right in pairs]
        experts = len(weights[0])
        stacked = [torch.stack(dw[i : i + experts]) for i in range(0, len(dw), experts)]
        return dx, None, None, *stacked


def _matrices(weights: Sequence[Tensor], turned: bool) -> list[Tensor]:
    """Return the matrix of each source and expert, aligned; ``turned``: transposed."""
    found = [_aligned(matrix) for weight in weights for matrix in weight]
    return [matrix.t() for matrix in found] if turned else found


def _aligned(x: Tensor) -> Tensor:
    """Return ``x``, of any shape, or a copy, at an address of the alignment of new tensors."""
    return x.clone() if x.data_ptr() % _ALIGNED else x
